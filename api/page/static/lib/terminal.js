// A small terminal for the output of one rank: carriage returns, backspaces and moves of the cursor change
// rows that were drawn before, as progress bars do.

// The rows, counted from the bottom, that the cursor can reach.
const REACH = 64;
// The columns of a row that is drawn with moves; further text is dropped.
const WIDEST = 4096;
const CONTROL = /\x1b\[([0-9;:?<=>!]*)[ -/]*([@-~])|\x1b[\]PX^_]([^\x07\x1b]*)(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?|[\x00-\x1f\x7f-\x9f]/g;
const MOVES = /[\r\x08]|\x1b\[[0-9;?]*[A-GJK]/;
const TAB = 8;

// A row is [[character, style]]; the style is the sequence of SGR escapes before the character.
const textOf = (cells) => {
  let style = '';
  let text = '';
  for (const [character, its] of cells) {
    if (its !== style) text += `\x1b[0m${its}`;
    style = its;
    text += character;
  }
  return text.trimEnd();
};

function cellsOf(text) {
  const cells = [];
  draw(text, { row: () => cells, column: 0, move: () => {}, clear: () => {} });
  return cells;
}

// Draws text on `at.row()` from `at.column`; `at.move(kind, number)` moves the cursor between rows.
function draw(text, at) {
  let style = '';
  let from = 0;
  const put = (piece) => {
    const cells = at.row();
    for (const character of piece) {
      if (at.column >= WIDEST) return;
      while (cells.length < at.column) cells.push([' ', '']);
      cells[at.column] = [character, style];
      at.column += 1;
    }
  };
  for (const match of text.matchAll(CONTROL)) {
    put(text.slice(from, match.index));
    from = match.index + match[0].length;
    const kind = match[2] ?? match[0];
    const given = Math.min(WIDEST, parseInt(match[1], 10) || 0);
    const number = given || 1;
    if (kind === 'm') style = /^0*$/.test(match[1]) ? '' : `${style}${match[0]}`.slice(-200);
    else if (kind === '\r') at.column = 0;
    else if (kind === '\x08' || kind === 'D') at.column = Math.max(0, at.column - number);
    else if (kind === 'C') at.column = Math.min(WIDEST - 1, at.column + number);
    else if (kind === 'G') at.column = number - 1;
    else if (kind === '\t') at.column = Math.min(WIDEST - 1, TAB * (Math.floor(at.column / TAB) + 1));
    else if (kind === 'K') erase(at, given);
    else if (kind === 'J' && given === 0) { // a log keeps its lines: other modes would clear the screen
      erase(at, 0);
      at.clear();
    }
    else if ('ABEF'.includes(kind)) {
      at.move(kind === 'A' || kind === 'F' ? -number : number);
      if (kind === 'E' || kind === 'F') at.column = 0;
    }
  }
  put(text.slice(from));
}

function erase(at, mode) {
  const cells = at.row();
  if (mode === 0) cells.length = Math.min(cells.length, at.column);
  else if (mode === 1) for (let i = 0; i <= Math.min(at.column, cells.length - 1); i += 1) cells[i] = [' ', ''];
  else if (mode === 2) cells.length = 0;
}

// The rows that lines of one rank draw. `write(line)` returns the lines to show: `added`, and `changed`, whose
// text is that of an earlier line drawn anew. Only the last rows can change.
export class Terminal {
  constructor() {
    this.rows = []; // the rows that can still change: [{line, cells}], with cells only where they were needed
    this.at = 0;
    this.named = new Map();
  }

  write(line) {
    const raw = line.text;
    // A row that a progress bar draws again and again: the server names it.
    const drawn = line.row && this.named.get(line.row);
    if (drawn) return { added: [], changed: [Object.assign(drawn, { text: raw, time: line.time, number: line.number })] };
    if (line.row) this.named.set(line.row, line);
    if (this.named.size > REACH) this.named.delete(this.named.keys().next().value);
    if (!MOVES.test(raw) && this.at === this.rows.length) return this.#append({ line, cells: null });
    const touched = new Set();
    const added = [];
    const row = () => {
      while (this.at >= this.rows.length) {
        const one = { line: Object.assign(line, { text: '' }), cells: [] };
        this.rows.push(one);
        added.push(one.line);
      }
      const one = this.rows[this.at];
      one.cells ??= cellsOf(one.line.text);
      touched.add(one);
      return one.cells;
    };
    const cursor = {
      row,
      column: 0,
      move: (by) => { this.at = Math.max(0, Math.min(this.rows.length - 1, this.at + by)); },
      clear: () => {
        for (const one of this.rows.slice(this.at + 1)) {
          one.cells = [];
          touched.add(one);
        }
      },
    };
    row();
    draw(raw, cursor);
    this.at += 1;
    for (const one of touched) one.line.text = textOf(one.cells);
    this.#trim();
    return { added, changed: [...touched].map((one) => one.line).filter((one) => !added.includes(one)) };
  }

  #append(row) {
    this.rows.push(row);
    this.at += 1;
    this.#trim();
    return { added: [row.line], changed: [] };
  }

  #trim() {
    const more = this.rows.length - REACH;
    if (more <= 0) return;
    this.rows.splice(0, more);
    this.at = Math.max(0, this.at - more);
  }
}
