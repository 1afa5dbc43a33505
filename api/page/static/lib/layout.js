// The layout of the charts of an experiment, as the server keeps it: {tools, order, charts}. `tools` are the
// options of all charts, `order` the names of the pinned charts, and `charts` has for each name what readers have
// changed: {metrics, limits, pinned}.

const TOOLS = { x: '', log: false, smooth: 0, kind: '', outliers: false };
const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);
const isText = (value) => typeof value === 'string';
const same = (a, b) => canonical(a) === canonical(b);

// Equal values have equal texts, whatever the order of their fields.
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join()}]`;
  if (isObject(value)) return `{${Object.keys(value).filter((key) => value[key] !== undefined).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join()}}`;
  return JSON.stringify(value) ?? 'null';
}

// The layout of the options of charts. options: as in panels.js.
export function layoutOf(options) {
  const charts = {};
  const chart = (name) => {
    if (!Object.hasOwn(charts, name)) Object.defineProperty(charts, name, { value: {}, enumerable: true, configurable: true, writable: true });
    return charts[name];
  };
  for (const keys of options.together) chart(keys.join(', ')).metrics = keys;
  for (const [name, limits] of options.limits) chart(name).limits = limits;
  for (const name of options.pins) chart(name).pinned = true;
  const tools = Object.fromEntries(Object.entries(TOOLS).filter(([name, usual]) => options[name] !== usual).map(([name]) => [name, options[name]]));
  return { tools, order: [...options.pins], charts };
}

// The options of a layout. Another program may have stored it, so parts that can't be drawn are left out.
export function optionsOf(layout) {
  const { tools, order, charts } = parts(layout);
  const entries = Object.entries(charts);
  const pinned = entries.filter(([, one]) => one.pinned === true).map(([name]) => name);
  return {
    ...TOOLS,
    ...Object.fromEntries(Object.entries(tools).filter(([name, value]) => Object.hasOwn(TOOLS, name) && typeof value === typeof TOOLS[name])),
    pins: [...order.filter((name) => pinned.includes(name)), ...pinned.filter((name) => !order.includes(name))],
    together: entries.map(([, one]) => one.metrics).filter((keys) => Array.isArray(keys) && keys.length > 1 && keys.every(isText)),
    limits: new Map(entries.filter(([, { limits }]) => isLimits(limits)).map(([name, { limits }]) => [name, limits])),
  };
}

const isLimits = (limits) => Array.isArray(limits) && limits.length === 2 && limits.every((one) => one === null || Number.isFinite(one)) && limits.some((one) => one !== null);

function parts(layout) {
  const { tools, order, charts } = isObject(layout) ? layout : {};
  return {
    tools: isObject(tools) ? tools : {},
    order: Array.isArray(order) ? [...new Set(order.filter(isText))] : [],
    charts: isObject(charts) ? Object.fromEntries(Object.entries(charts).filter(([, one]) => isObject(one))) : {},
  };
}

export const isSameLayout = (a, b) => same(parts(a), parts(b));

const ORDER = 'order';
const about = (kind, name) => `${kind} ${name}`;

// What two people have changed: `mine` and `theirs` both come from `base`. Returns the merged layout, and what
// both have changed differently: [{id, kind, name, mine, theirs}]. `chosen` has 'mine' or 'theirs' by id; without
// a choice, theirs is kept.
export function merge(base, mine, theirs, chosen = {}) {
  const [b, m, t] = [base, mine, theirs].map(parts);
  const conflicts = [];
  const decide = (kind, name, ofBase, ofMine, ofTheirs) => {
    if (same(ofMine, ofBase) || same(ofMine, ofTheirs)) return ofTheirs;
    if (same(ofTheirs, ofBase)) return ofMine;
    const id = about(kind, name);
    conflicts.push({ id, kind, name, mine: ofMine, theirs: ofTheirs });
    return chosen[id] === 'mine' ? ofMine : ofTheirs;
  };
  const together = (kind, get) => Object.fromEntries([...new Set([b, m, t].flatMap((one) => Object.keys(get(one))))]
    .map((name) => [name, decide(kind, name, ...[b, m, t].map((one) => (Object.hasOwn(get(one), name) ? get(one)[name] : undefined)))])
    .filter(([, value]) => value !== undefined));
  const tools = together('tool', (one) => one.tools);
  const charts = together('chart', (one) => one.charts);
  // The charts that all three have pinned have an order that both can have changed.
  const common = (order) => order.filter((name) => [b, m, t].every((one) => one.order.includes(name)));
  const [ofBase, ofMine, ofTheirs] = [b, m, t].map((one) => common(one.order));
  const kept = decide(ORDER, '', ofBase, ofMine, ofTheirs);
  const [first, second] = same(kept, ofTheirs) ? [t, m] : [m, t];
  const order = inserted(first.order, second.order).filter((name) => charts[name]?.pinned === true);
  return { layout: { tools, order, charts }, conflicts };
}

// The names of `order`, and the names that only `other` has, each behind the name before it there.
function inserted(order, other) {
  const found = [...order];
  other.forEach((name, n) => {
    if (found.includes(name)) return;
    found.splice(n ? found.indexOf(other[n - 1]) + 1 : 0, 0, name);
  });
  return found;
}

const NAMES = { x: 'x axis', log: 'log scale', smooth: 'smoothing', kind: 'kind of smoothing', outliers: 'ignore outliers' };

// The name of a conflict, and the description of one of its two versions.
export const titleOf = ({ kind, name }) => (kind === ORDER ? 'Order of the pinned charts' : kind === 'tool' ? NAMES[name] ?? name : `Chart ${name}`);

export function wordsOf({ kind, name }, value) {
  if (kind === ORDER) return value.join(', ');
  if (kind === 'tool') return value === undefined ? name === 'x' ? 'steps' : 'off' : value === true ? 'on' : String(value);
  if (value === undefined) return 'not changed';
  const limits = isLimits(value.limits) ? `y from ${value.limits[0] ?? 'what fits'} to ${value.limits[1] ?? 'what fits'}` : '';
  return [value.metrics && 'a chart of its own', value.pinned ? 'pinned' : 'not pinned', limits].filter(Boolean).join(', ');
}
