// Histograms over the steps, as a heat map: a column for each step, darker where more values are.

import { number, whole } from '../lib/format.js';
import { html, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { usePoll } from '../lib/live.js';
import { useMedia } from './virtual.js';

const ROWS = 64;
const HEIGHT = 140;

// path, query: of the records. every: their polling period. step: the chosen one, which is marked.
export function HeatMap({ path, query, every, step, title }) {
  const canvas = useRef(null);
  const [near, setNear] = useState(null);
  const [width, setWidth] = useState(0);
  const isDark = useMedia('(prefers-color-scheme: dark)');
  const items = usePoll(path, query, every).data?.items;
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    watch.observe(canvas.current);
    return () => watch.disconnect();
  }, []);
  const map = useMemo(() => (items?.length ? mapped(items) : null), [items]);
  useLayoutEffect(() => {
    if (map && width) draw(canvas.current, map.columns, width, items.findLastIndex((one) => one.step <= step));
  }, [map, width, step, isDark]);
  const point = (event) => {
    if (!map) return;
    const box = event.currentTarget.getBoundingClientRect();
    const column = Math.min(items.length - 1, Math.floor(((event.clientX - box.left) / box.width) * items.length));
    const row = Math.min(ROWS - 1, Math.max(0, Math.floor((1 - (event.clientY - box.top) / box.height) * ROWS)));
    const at = (n) => map.low * (1 - n / ROWS) + map.high * (n / ROWS);
    setNear(`step ${whole(items[column].step)}, ${number(at(row))} to ${number(at(row + 1))}: about ${whole(Math.round(map.columns[column][row]))} values`);
  };
  const range = map ? `values from ${number(map.low)} to ${number(map.high)}, steps ${whole(items[0].step)} to ${whole(items.at(-1).step)}` : '';
  return html`<canvas ref=${canvas} class="heat" role="img" aria-label=${`Histograms of ${title} over steps: ${range}`} onPointerMove=${point} onPointerLeave=${() => setNear(null)}></canvas>
    <p class="soft">${near ?? range}</p>`;
}

// The position of a value between `low` (0) and `high` (1). All are halved, because the difference of two numbers can
// be infinite.
export const shareOf = (value, low, high) => (value / 2 - low / 2) / (high / 2 - low / 2);

// The counts of all histograms in the same bins: {low, high, columns}.
function mapped(items) {
  const low = Math.min(...items.map(({ value }) => value.edges[0]));
  const high = Math.max(...items.map(({ value }) => value.edges.at(-1)));
  const columns = items.map(({ value: { counts, edges } }) => {
    const rows = new Float64Array(ROWS);
    counts.forEach((count, n) => {
      // Divides the count of a bin among the rows that it covers.
      const [from, to] = [edges[n], edges[n + 1]].map((edge) => shareOf(edge, low, high) * ROWS);
      for (let row = Math.floor(from); row < Math.min(ROWS, to); row += 1) rows[row] += (count * (Math.min(to, row + 1) - Math.max(from, row))) / (to - from);
    });
    return rows;
  });
  return { low, high, columns };
}

// Draws each column in shares of its own values, because the number of values can differ. marked: the index of the
// column with a frame.
function draw(canvas, columns, width, marked) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  context.fillStyle = getComputedStyle(canvas).color;
  const [wide, tall] = [width / columns.length, HEIGHT / ROWS];
  columns.forEach((rows, n) => {
    const most = Math.max(...rows);
    if (!most) return;
    rows.forEach((count, row) => {
      if (!count) return;
      context.globalAlpha = 0.08 + 0.92 * Math.sqrt(count / most);
      context.fillRect(n * wide, HEIGHT - (row + 1) * tall, wide + 0.3, tall + 0.3);
    });
  });
  context.globalAlpha = 1;
  context.strokeStyle = getComputedStyle(canvas.parentElement).color;
  context.strokeRect(marked * wide + 0.5, 0.5, Math.max(1, wide - 1), HEIGHT - 1);
}
