// The schema of the job document: defaults, fields and their descriptions.

function resolved(schema, root) {
  let at = schema;
  while (at?.$ref) at = at.$ref.slice(2).split('/').reduce((found, part) => found?.[part], root);
  return at;
}

// The schemas that can apply to a value of this schema.
function choices(schema, root) {
  const at = resolved(schema, root);
  if (!at) return [];
  return [at, ...(at.anyOf ?? at.oneOf ?? at.allOf ?? []).flatMap((one) => choices(one, root))];
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// The document without the fields that have their default.
export function withoutDefaults(document, root, schema = root) {
  const objects = choices(schema, root).filter(({ properties }) => properties);
  const fits = objects.find(({ properties }) => !properties.name?.const || properties.name.const === document.name) ?? objects[0];
  if (!fits) return document;
  const kept = {};
  for (const [name, value] of Object.entries(document)) {
    const field = fits.properties[name];
    if (value === null || (field && 'default' in field && same(field.default, value) && !field.const)) continue;
    const isObject = value && typeof value === 'object' && !Array.isArray(value);
    const inner = isObject && field ? withoutDefaults(value, root, field) : value;
    if (isObject && Object.keys(inner).length === 0) continue;
    kept[name] = inner;
  }
  return kept;
}

const MOST_LEAVES = 400;

// The paths of a document's fields that have plain values: `train.optimizer.lr`.
export function leavesOf(root) {
  const found = new Set();
  const visit = (schema, path, depth) => {
    for (const { properties } of choices(schema, root)) {
      for (const [name, field] of Object.entries(properties ?? {})) {
        const at = [...path, name];
        const isPart = choices(field, root).some((one) => one.properties);
        if (isPart && depth < 4) visit(field, at, depth + 1);
        else if (!isPart && found.size < MOST_LEAVES) found.add(at.join('.'));
      }
    }
  };
  for (const part of ['train', 'model', 'data', 'sync', 'resources']) visit({ properties: Object.fromEntries(choices(root, root).flatMap(({ properties }) => (properties?.[part] ? [[part, properties[part]]] : []))) }, [], 0);
  return [...found];
}

// The possible fields of an object at this path of keys: [{name, description}].
export function fieldsAt(path, root) {
  let at = choices(root, root);
  for (const key of path) {
    at = at.flatMap((schema) => choices(schema.properties?.[key] ?? (schema.additionalProperties || null) ?? schema.items, root));
  }
  const found = new Map();
  for (const { properties = {} } of at) for (const [name, field] of Object.entries(properties)) if (!found.has(name)) found.set(name, field.description ?? resolved(field, root)?.description ?? '');
  return [...found].map(([name, description]) => ({ name, description }));
}
