// Converts log lines with terminal escapes to pieces of text with classes. No part of a line becomes
// markup: colours and weights are kept, other escapes and control characters are dropped. Characters
// that change the direction of text are shown as escapes.

const ESCAPE = /\x1b\[([0-9;:?<=>!]*)([ -/]*)([@-~])|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]/g;
const DIRECTION = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const PLAIN = { fg: null, bg: null, bold: false, dim: false, italic: false, underline: false, inverse: false };
const COLOURS = ['black', 'red', 'green', 'yellow', 'blue', 'magenta', 'cyan', 'white'];

// The one of the page's eight colours that is nearest to a 256-colour or true-colour value.
function nearest(r, g, b) {
  const high = Math.max(r, g, b);
  if (high < 60) return 'black';
  const bit = (value) => (value > high * 0.6 ? 1 : 0);
  return COLOURS[bit(r) + 2 * bit(g) + 4 * bit(b)];
}

function of256(index) {
  if (index < 16) return COLOURS[index % 8];
  if (index >= 232) return index < 238 ? 'black' : 'white';
  const cube = index - 16;
  return nearest(51 * Math.floor(cube / 36), 51 * (Math.floor(cube / 6) % 6), 51 * (cube % 6));
}

function applied(style, codes) {
  const next = { ...style };
  for (let i = 0; i < codes.length; i += 1) {
    const code = codes[i];
    if (code === 0) Object.assign(next, PLAIN);
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 3) next.italic = true;
    else if (code === 4) next.underline = true;
    else if (code === 7) next.inverse = true;
    else if (code === 22) next.bold = next.dim = false;
    else if (code === 23) next.italic = false;
    else if (code === 24) next.underline = false;
    else if (code === 27) next.inverse = false;
    else if (code >= 30 && code <= 37) next.fg = COLOURS[code - 30];
    else if (code >= 90 && code <= 97) next.fg = COLOURS[code - 90];
    else if (code >= 40 && code <= 47) next.bg = COLOURS[code - 40];
    else if (code >= 100 && code <= 107) next.bg = COLOURS[code - 100];
    else if (code === 39) next.fg = null;
    else if (code === 49) next.bg = null;
    else if (code === 38 || code === 48) {
      const name = code === 38 ? 'fg' : 'bg';
      if (codes[i + 1] === 5) {
        next[name] = of256(codes[i + 2] || 0);
        i += 2;
      } else if (codes[i + 1] === 2) {
        next[name] = nearest(codes[i + 2] || 0, codes[i + 3] || 0, codes[i + 4] || 0);
        i += 4;
      }
    }
  }
  return next;
}

function classOf(style) {
  const names = ['bold', 'dim', 'italic', 'underline', 'inverse'].filter((name) => style[name]).map((name) => `ansi-${name}`);
  if (style.fg) names.push(`ansi-${style.fg}`);
  if (style.bg) names.push(`ansi-on-${style.bg}`);
  return names.join(' ');
}

const shown = (text) => text.replace(DIRECTION, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, '0')}`);

// One line as [{text, className}].
export function pieces(raw) {
  const line = shown(raw);
  if (!/[\x00-\x08\x0b-\x1f\x7f-\x9f]/.test(line)) return [{ text: line, className: '' }];
  const found = [];
  let style = PLAIN;
  let from = 0;
  const add = (text) => { if (text) found.push({ text, className: classOf(style) }); };
  for (const match of line.matchAll(ESCAPE)) {
    add(line.slice(from, match.index));
    from = match.index + match[0].length;
    if (match[3] === 'm' && !match[2] && /^[0-9;:]*$/.test(match[1])) {
      style = applied(style, match[1] ? match[1].split(/[;:]/).map(Number) : [0]);
    }
  }
  add(line.slice(from));
  return found;
}

// The line without escapes, for searching.
export const plain = (line) => shown(line).replace(ESCAPE, '');
