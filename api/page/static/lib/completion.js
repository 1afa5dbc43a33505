// Completes a search expression at the cursor.

const COLUMNS = ['state', 'name', 'queue', 'owner', 'project', 'experiment', 'id', 'priority', 'world_size', 'created_at', 'started_at', 'finished_at'];
const ORDERED = ['<', '<=', '>', '>=', '=', '!='];
const TEXTS = new Set(['state', 'name', 'queue', 'owner', 'project', 'experiment', 'id']);
const MOST = 12;
const FIELD = /(?:^|\(|\b(?:and|or|not)\s)\s*((?:(?:min|max|last|exists)\()?[\w./-]*)$/i;
const OPERATOR = /(?:^|\(|\s)((?:min|max|last)\([\w./-]+\)|[\w./-]+)\s+([<>=!]*)$/;
const VALUE = /([\w./-]+)(\s*!?=|\s+(?:not\s+)?in\s*\((?:[^()]*,)?)\s*(["']?)([\w./@-]*)$/i;
const COMPLETE = /(?:[<>=]\s*[^\s"'()]+|["')]|\btags)\s+(\w*)$/i;

const quoted = (text) => `"${text.replace(/["\\]/g, '\\$&')}"`;
const starting = (words, typed) => {
  const text = typed.toLowerCase();
  const at = words.filter((word) => word.toLowerCase().startsWith(text));
  return [...at, ...words.filter((word) => !at.includes(word) && word.toLowerCase().includes(text))].filter((word) => word !== typed).slice(0, MOST);
};

// A metric as it is written in an expression.
export const metricName = (key) => (/^[\w.-]+(\/[\w.-]+)+$/.test(key) ? key : /^[A-Za-z_]\w*$/.test(key) ? `metrics.${key}` : `metrics[${quoted(key)}]`);
export const labelName = (key) => (/^[A-Za-z_]\w*$/.test(key) ? `labels.${key}` : `labels[${quoted(key)}]`);

// What can be written between `from` and the cursor: {from, options: [text]}. known: {metrics, labels, fields,
// tags, values}: names, and for some columns their values.
export function completions(text, cursor, { metrics, labels, fields, tags, values }) {
  const before = text.slice(0, cursor);
  const found = VALUE.exec(before);
  if (found && (values[found[1]] || TEXTS.has(found[1]))) {
    const [, name, sign, quote, typed] = found;
    return { from: cursor - typed.length - quote.length, options: starting((values[name] ?? []).map(quoted), typed && `"${typed}`).map((one) => `${one}${sign.includes('=') ? ' ' : ') '}`) };
  }
  const ends = COMPLETE.exec(before);
  if (ends) return { from: cursor - ends[1].length, options: starting(['and', 'or'], ends[1]).map((one) => `${one} `) };
  const name = FIELD.exec(before);
  if (name) {
    const [, call = '', typed] = /^((?:min|max|last|exists)\()?(.*)$/.exec(name[1]);
    const names = [...COLUMNS, ...metrics.map(metricName), ...labels.map(labelName), ...fields];
    const more = call ? [] : [...tags.map((tag) => `${quoted(tag)} in tags`), 'not', 'max(', 'min(', 'exists('];
    return { from: cursor - typed.length, options: starting([...names, ...more], typed).map((one) => (call ? `${one})` : one.endsWith('(') ? one : `${one} `)) };
  }
  const sign = OPERATOR.exec(before);
  if (sign && !/^(and|or|not|in)$/i.test(sign[1])) {
    return { from: cursor - sign[2].length, options: starting(TEXTS.has(sign[1]) ? ['=', '!=', 'in ('] : ORDERED, sign[2]).map((one) => (one.endsWith('(') ? one : `${one} `)) };
  }
  return { from: cursor, options: [] };
}
