// Renders Markdown as Preact nodes. HTML remains text, links can lead only to http and https, and images
// become links. Rendering takes time proportional to the length of the text, because the end of an unclosed
// mark is searched for only once.

import { html } from './html.js';

const DEEPEST = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^ {0,3}([-*+]|\d{1,9}[.)])(?: {1,4}|$)/;
const LINK = /!?\[([^[\]]*)\]\(((?:[^\s()]|\([^\s()]*\))*)(?:[ \t]+"[^"]*")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2000}/y;
const TICKS = /`+/y;
const ENDS = /[.,;:!?'*_~)\]]/;
const MARKS = ['**', '__', '~~', '*', '_'];
const TAGS = { '**': 'strong', '__': 'strong', '~~': 'del', '*': 'em', '_': 'em' };
const isBlank = (line) => line.trim() === '';
const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);

// above: the number of levels of headings on the page that are above the first level of the text.
export const markdown = (text, above = 2) => blocks(text.replace(/\r\n?/g, '\n').replaceAll('\t', '    ').split('\n'), 0, above);

function blocks(lines, depth, above) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    const [node, next] = blank(lines, at) ?? fence(lines, at) ?? heading(lines, at, above) ?? quote(lines, at, depth, above) ?? list(lines, at, depth, above) ?? table(lines, at) ?? paragraph(lines, at, depth);
    if (node) found.push(node);
    at = next;
  }
  return found;
}

const blank = (lines, at) => (isBlank(lines[at]) ? [null, at + 1] : null);

function fence(lines, at) {
  const [, mark] = FENCE.exec(lines[at]) ?? [];
  if (!mark) return null;
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ''))) end += 1;
  return [html`<pre><code>${lines.slice(at + 1, end).join('\n')}</code></pre>`, end + 1];
}

function heading(lines, at, above) {
  const [all, marks] = HEADING.exec(lines[at]) ?? [];
  if (RULE.test(lines[at])) return [html`<hr />`, at + 1];
  if (!marks) return null;
  return [html`<${`h${Math.min(6, marks.length + above)}`}>${inline(lines[at].slice(all.length))}<//>`, at + 1];
}

function quote(lines, at, depth, above) {
  if (depth >= DEEPEST || !QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [html`<blockquote>${blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, '')), depth + 1, above)}</blockquote>`, end];
}

function list(lines, at, depth, above) {
  const first = ITEM.exec(lines[at]);
  if (depth >= DEEPEST || !first) return null;
  const kind = first[1].at(-1);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].at(-1) !== kind || RULE.test(lines[end])) break;
    const indent = ' '.repeat(item[0].length);
    const content = [lines[end].slice(item[0].length)];
    end += 1;
    while (end < lines.length) {
      const goesOn = lines[end].startsWith(indent) || (isBlank(lines[end]) && lines[end + 1]?.startsWith(indent));
      if (!goesOn && (isBlank(lines[end]) || begins(lines[end]))) break;
      content.push(goesOn ? lines[end].slice(indent.length) : lines[end].trim());
      end += 1;
    }
    while (end < lines.length && isBlank(lines[end]) && ITEM.test(lines[end + 1] ?? '')) end += 1;
    items.push(html`<li>${blocks(content, depth + 1, above)}</li>`);
  }
  if (/\d/.test(first[1])) return [html`<ol start=${parseInt(first[1], 10)}>${items}</ol>`, end];
  return [html`<ul>${items}</ul>`, end];
}

const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
const cells = (line) => line.trim().replace(/^\|/, '').replace(/\|$/, '').split('|').map((cell) => cell.trim());

function table(lines, at) {
  const below = lines[at + 1];
  if (!lines[at].includes('|') || !below?.includes('-') || !cells(below).every((cell) => /^:?-+:?$/.test(cell))) return null;
  const names = cells(lines[at]);
  if (names.length !== cells(below).length) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes('|')) end += 1;
  const rows = lines.slice(at + 2, end).map(cells);
  return [html`<table><thead><tr>${names.map((name) => html`<th>${inline(name)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.slice(0, names.length).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody></table>`, end];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && (depth >= DEEPEST || !begins(lines[end]))) end += 1;
  return [html`<p>${inline(lines.slice(at, end).map((line) => line.trim()).join('\n'))}</p>`, end];
}

const isOpen = (text, at, mark) => /\S/.test(text[at + mark.length] ?? ' ') && (mark[0] !== '_' || !isWord(text[at - 1]));

// The position of the next `mark` that can be a closing one; -1 if there is none.
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + 1)) {
    const [before, after] = [text[at - 1], text[at + mark.length]];
    const isLone = mark.length === 2 || before !== mark;
    if (at > from && /[^\s\\]/.test(before) && after !== mark[0] && isLone && (mark[0] !== '_' || !isWord(after))) return at;
  }
  return -1;
}

function inline(text, depth = 0, withLinks = true) {
  const found = [];
  const unclosed = new Set();
  let plain = '';
  const add = (node, next) => {
    if (plain) found.push(plain);
    plain = '';
    found.push(node);
    return next;
  };
  for (let at = 0; at < text.length;) at = piece(at);
  if (plain) found.push(plain);
  return found;

  // Add the piece that begins at this position; returns its end.
  function piece(at) {
    const character = text[at];
    if (character === '\\' && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? '')) {
      plain += text[at + 1];
      return at + 2;
    }
    if (character === '`') return code(at);
    if (withLinks && (character === '[' || (character === '!' && text[at + 1] === '['))) {
      const [all, label, href] = matched(LINK, at);
      const to = address(href);
      if (to) return add(anchor(to, label ? inline(label, depth + 1, false) : to), at + all.length);
    }
    if (withLinks && character === 'h' && !isWord(text[at - 1])) {
      let [all = ''] = matched(ADDRESS, at);
      while (ENDS.test(all.at(-1) ?? '')) all = all.slice(0, -1);
      const to = address(all);
      if (to) return add(anchor(to, all), at + all.length);
    }
    const mark = depth < DEEPEST && MARKS.find((one) => text.startsWith(one, at));
    if (mark && !unclosed.has(mark) && isOpen(text, at, mark)) {
      const end = closing(text, at + mark.length, mark);
      if (end >= 0) return add(html`<${TAGS[mark]}>${inline(text.slice(at + mark.length, end), depth + 1, withLinks)}<//>`, end + mark.length);
      unclosed.add(mark);
    }
    plain += mark || character;
    return at + (mark || character).length;
  }

  function code(at) {
    const [mark] = matched(TICKS, at);
    if (!unclosed.has(mark)) {
      for (let end = text.indexOf(mark, at + mark.length); end >= 0;) {
        let after = end + mark.length;
        if (text[after] !== '`') return add(html`<code>${text.slice(at + mark.length, end)}</code>`, after);
        while (text[after] === '`') after += 1;
        end = text.indexOf(mark, after);
      }
      unclosed.add(mark);
    }
    plain += mark;
    return at + mark.length;
  }

  function matched(pattern, at) {
    pattern.lastIndex = at;
    return pattern.exec(text) ?? [];
  }
}

const anchor = (href, label) => html`<a href=${href} target="_blank" rel="noopener noreferrer">${label}</a>`;

// The complete address if it is an http or https address, otherwise null.
function address(text) {
  const url = /^https?:\/\//i.test(text ?? '') && URL.canParse(text) ? new URL(text) : null;
  return url && (url.protocol === 'http:' || url.protocol === 'https:') ? url.href : null;
}
