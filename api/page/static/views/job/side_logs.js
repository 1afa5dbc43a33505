// The output of several ranks side by side, aligned by time; on a phone, one rank below the other.

import { pieces, plain } from '../../lib/ansi.js';
import { clock, exactly } from '../../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { rankName } from '../../lib/topology.js';
import { useVirtual } from '../../parts/virtual.js';
import { keyOf } from './failure_line.js';

const LINE = 19;
const HEAD = 30;
const PADDING = 26;
const GAP = 16;
const FEWEST = 8;
export const MOST_SIDES = 8;

// The ranks in the address, such as `0,3`.
export function sidesIn(params, worldSize) {
  const ranks = (params.get('side') ?? '').split(',').filter((one) => /^\d{1,9}$/.test(one)).map(Number);
  return [...new Set(ranks)].filter((rank) => rank < worldSize).slice(0, MOST_SIDES);
}

// Rows of the lines of these ranks: [[line or null for each rank]]. Within a second, each rank's lines begin in the
// same row. The lines of a rank keep their order.
export function aligned(lines, ranks) {
  const column = new Map(ranks.map((rank, n) => [rank, n]));
  const used = ranks.map(() => 0);
  const rows = [];
  let [start, second] = [0, -Infinity];
  for (const line of lines) {
    const n = column.get(line.rank);
    if (n === undefined) continue;
    const its = Math.floor(Date.parse(line.time) / 1000);
    if (its > second) {
      [start, second] = [rows.length, its];
      used.fill(0);
    }
    const at = start + used[n];
    used[n] += 1;
    if (!rows[at]) rows[at] = ranks.map(() => null);
    rows[at][n] = line;
  }
  return rows;
}

// shown: {key, n}, the line to scroll to; `n` changes each time.
export function SideLogs({ isNarrow, ranks, ...others }) {
  const groups = isNarrow ? ranks.map((rank) => [rank]) : [ranks];
  return html`<div class=${isNarrow ? 'sides stacked' : 'sides'}>${groups.map((group) => html`<${SideBox} key=${group.join()} ranks=${group} ...${others} />`)}</div>`;
}

function SideBox({ spec, lines, ranks, wrap, withTimes, follow, onLeave, shown, onRemove, cut }) {
  const box = useRef(null);
  const probe = useRef(null);
  const rows = useMemo(() => aligned(lines, ranks), [lines, ranks.join()]);
  const timeWidth = withTimes && rows.length ? clock(timeOf(rows.at(-1))).length : 0;
  const width = useCharacters(box, probe, ranks.length, timeWidth);
  const offsets = useMemo(() => (wrap ? offsetsOf(rows, width, cut) : null), [rows, wrap, width]);
  const { first, last, above, below } = useVirtual(box, rows.length, LINE, false, offsets);
  const places = useMemo(() => new Map(rows.flatMap((row, n) => row.filter(Boolean).map((line) => [keyOf(line), n]))), [rows]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [rows, follow, offsets]);
  useEffect(() => {
    const at = places.get(shown.key);
    if (at === undefined) return;
    box.current.scrollTop = (offsets ? offsets[at] : at * LINE) + HEAD - box.current.clientHeight / 2;
  }, [shown.n]);
  const scrolled = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    if (follow && scrollHeight - scrollTop - clientHeight > 3 * LINE) onLeave();
  };
  const names = ranks.map((rank) => rankName(spec, rank));
  const grid = { gridTemplateColumns: `${timeWidth ? `${timeWidth + 2}ch ` : ''}repeat(${ranks.length}, minmax(0, 1fr))` };
  return html`<div class=${wrap ? 'log wraps' : 'log'} ref=${box} tabindex="0" role="log" aria-label=${`Output of ${names.join(', ')}`} aria-live="off" onScroll=${scrolled}>
      <span class="probe" ref=${probe} aria-hidden="true">${'0'.repeat(100)}</span>
      <div class="side-head" style=${grid}>${timeWidth > 0 && html`<span></span>`}${ranks.map((rank, n) => html`<span key=${rank}><span class=${`swatch colour-${rank % 8}`}></span>${names[n]} <button class="quiet" aria-label=${`Remove ${names[n]}`} onClick=${() => onRemove(rank)}>×</button></span>`)}</div>
      <div class="lines">
        <div style=${{ height: `${above}px` }}></div>
        ${rows.slice(first, last).map((row, n) => html`<div key=${first + n} class="line side" style=${{ ...grid, ...(offsets && { height: `${offsets[first + n + 1] - offsets[first + n]}px` }) }}>
          ${timeWidth > 0 && html`<span class="soft" title=${exactly(timeOf(row))}>${clock(timeOf(row))}</span>`}
          ${row.map((line, i) => html`<span key=${i} class=${`text ${line && keyOf(line) === shown.key ? 'hit' : ''}`} aria-current=${line && keyOf(line) === shown.key ? 'true' : undefined} title=${line ? `attempt ${line.attempt}, ${names[i]}, line ${line.number + 1}, ${exactly(line.time)}` : undefined}>${line && pieces(cut(line.text)).map(({ text, className }) => (className ? html`<span class=${className}>${text}</span>` : text))}</span>`)}</div>`)}
        <div style=${{ height: `${below}px` }}></div>
      </div></div>`;
}

const timeOf = (row) => row.find(Boolean).time;

// The number of characters of a row of one rank.
function useCharacters(box, probe, numRanks, timeWidth) {
  const [size, setSize] = useState({ width: 900, character: 7.5 });
  useEffect(() => {
    const watch = new ResizeObserver(() => setSize({ width: box.current.clientWidth, character: probe.current.getBoundingClientRect().width / 100 }));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const { width, character } = size;
  const left = width - PADDING - (timeWidth ? (timeWidth + 2) * character + GAP : 0) - GAP * (numRanks - 1);
  return Math.max(FEWEST, Math.floor(left / numRanks / character));
}

// The position of each row in pixels if lines wrap, and the height of all.
function offsetsOf(rows, width, cut) {
  const offsets = new Float64Array(rows.length + 1);
  rows.forEach((row, n) => {
    let most = 1;
    for (const line of row) {
      if (!line) continue;
      line.width ??= plain(cut(line.text)).length;
      most = Math.max(most, Math.ceil(line.width / width));
    }
    offsets[n + 1] = offsets[n] + LINE * most;
  });
  return offsets;
}
