// Finds the position of a JSON pointer in a JSON text, and the keys of a position.

// {pointer: {start, end}} of every value up to the first syntax error.
export function placesOf(text) {
  const places = new Map();
  let at = 0;
  const blank = () => { while (/\s/.test(text[at] ?? '')) at += 1; };
  const string = () => {
    const from = at;
    at += 1;
    while (at < text.length && text[at] !== '"') at += text[at] === '\\' ? 2 : 1;
    at += 1;
    return JSON.parse(text.slice(from, at));
  };
  const value = (pointer, keyAt) => {
    blank();
    const start = keyAt ?? at;
    if (text[at] === '{') {
      at += 1;
      for (blank(); at < text.length && text[at] !== '}'; blank()) {
        const key = at;
        const name = string();
        blank();
        if (text[at] !== ':') throw new SyntaxError('no colon');
        at += 1;
        value(`${pointer}/${name.replaceAll('~', '~0').replaceAll('/', '~1')}`, key);
        blank();
        if (text[at] === ',') at += 1;
      }
      at += 1;
    } else if (text[at] === '[') {
      at += 1;
      let index = 0;
      for (blank(); at < text.length && text[at] !== ']'; blank()) {
        value(`${pointer}/${index}`);
        index += 1;
        blank();
        if (text[at] === ',') at += 1;
      }
      at += 1;
    } else if (text[at] === '"') string();
    else {
      const from = at;
      while (at < text.length && !/[\s,\]}]/.test(text[at])) at += 1;
      if (from === at) throw new SyntaxError('no value');
    }
    places.set(pointer, { start, end: at });
  };
  try {
    value('');
  } catch {
    // The values before the error are kept.
  }
  return places;
}

// The position of the value at the pointer, or of the nearest existing object that would contain it.
export function placeOf(text, pointer) {
  const places = placesOf(text);
  for (let at = pointer ?? ''; ; at = at.slice(0, at.lastIndexOf('/'))) {
    if (places.has(at)) return places.get(at);
    if (at === '') return null;
  }
}

// The position of the line with this number.
export function lineAt(text, number) {
  const before = text.split('\n').slice(0, number - 1);
  const start = before.reduce((sum, line) => sum + line.length + 1, 0);
  const end = text.indexOf('\n', start);
  return { start, end: end < 0 ? text.length : end };
}

export const lineOf = (text, offset) => text.slice(0, offset).split('\n').length;

// The keys of the objects that enclose this offset, and the key that is being typed at the offset; null if
// no key is allowed there.
export function openAt(text, offset) {
  const stack = [];
  let key = null;
  let expects = false;
  for (let at = 0; at < offset; at += 1) {
    const char = text[at];
    if (char === '"') {
      const from = at + 1;
      at += 1;
      while (at < offset && text[at] !== '"') at += text[at] === '\\' ? 2 : 1;
      if (at >= offset) return { path: stack.map((one) => one.key).filter((one) => one !== null), typed: expects ? text.slice(from, offset) : null };
      if (expects) key = text.slice(from, at);
    } else if (char === '{') {
      stack.push({ key, isObject: true });
      key = null;
      expects = true;
    } else if (char === '[') {
      stack.push({ key, isObject: false });
      key = null;
      expects = false;
    } else if (char === '}' || char === ']') {
      stack.pop();
      expects = false;
    } else if (char === ',') expects = stack.at(-1)?.isObject ?? false;
    else if (char === ':') expects = false;
  }
  return { path: stack.map((one) => one.key).filter((one) => one !== null), typed: expects ? '' : null };
}
