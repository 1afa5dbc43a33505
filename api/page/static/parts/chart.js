// A chart of one or several curves, drawn by uPlot.

import { number } from '../lib/format.js';
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { placeText, shortNumber, shownRange, tickLabels, ticks } from '../lib/ticks.js';
import uPlot from '../lib/uplot.js';
import { useMedia, useSeen } from './virtual.js';

export const NUM_COLOURS = 8;
const SMOOTH_PARTS = 200;
const VALUES_SIZE = 50;

// The colour of the curve with this number.
export const Swatch = ({ n }) => html`<span class=${`keys colour-${n % NUM_COLOURS}`}><span class="swatch"></span></span>`;

const colour = (name) => {
  const probe = document.createElement('span');
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

export const asNumber = (value) => (typeof value === 'number' ? value : null);

// The values of a series for a curve. `NaN` and infinities are not drawn, but shown as text below the
// chart.
export const drawn = (values) => ({ ys: values.map(asNumber), texts: values.map((value) => (typeof value === 'string' ? value : null)) });

// A bias-corrected exponential moving average. Its window is a share of the x range, so that series
// with few and with many points are smoothed equally. Gaps remain gaps.
export function smoothed(xs, values, weight) {
  const width = xs.at(-1) - xs[0];
  if (!weight || !width) return values;
  let mean = 0;
  let norm = 0;
  let before = xs[0];
  return values.map((value, i) => {
    if (value === null || value === undefined) return value;
    const kept = weight ** ((SMOOTH_PARTS * (xs[i] - before)) / width || 1);
    before = xs[i];
    mean = kept * mean + (1 - kept) * value;
    norm = kept * norm + (1 - kept);
    return norm ? mean / norm : value;
  });
}

// A chart that is drawn once it comes into view, since a job may have hundreds.
export function Chart(props) {
  const box = useRef(null);
  const seen = useSeen(box);
  return html`<div class="chart" ref=${box}>${seen ? html`<${Plot} ...${props} />` : html`<div class="plot"></div>`}</div>`;
}

// curves: [{name, xs, ys, texts, band: {xs, low, high}}], texts from `drawn`. marks: [{x}], drawn as
// dashed lines. axis: the kind of x, as in ticks.js. range: [from, to] of x, or null for all.
// onZoom: called with [from, to] when the reader drags over a part.
function Plot({ curves, marks = [], log = false, smooth = 0, range = null, onZoom, axis = 'step', sync, label }) {
  const box = useRef(null);
  const plot = useRef(null);
  const newest = useRef([]);
  const [at, setAt] = useState(null);
  const isDark = useMedia('(prefers-color-scheme: dark)');
  const current = useRef({});
  const data = useMemo(() => aligned(curves, smooth, log), [curves, smooth, log]);
  current.current = { marks, range, onZoom, data };
  const shape = JSON.stringify([curves.map(({ name, band }) => [name, Boolean(band)]), log, axis, Boolean(smooth), isDark, sync]);

  useLayoutEffect(() => {
    const made = new uPlot(options(box.current, current, curves, { log, axis, smooth, sync, setAt }), current.current.data, box.current);
    plot.current = made;
    newest.current = [data, range];
    const watch = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: box.current.clientHeight }));
    watch.observe(box.current);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    // Skip this if only the cursor has moved, which also renders this component.
    if (newest.current[0] === data && newest.current[1] === range) return;
    newest.current = [data, range];
    plot.current.setData(data);
  });

  const index = at ?? data[0].length - 1;
  const [isRead, setIsRead] = useState(false);
  const key = (event) => {
    const u = plot.current;
    const [first, last] = u.series[0].idxs ?? [0, 0];
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, PageUp: index - 20, PageDown: index + 20, Home: first, End: last }[event.key];
    if (to !== undefined) {
      setIsRead(true);
      u.setCursor({ left: u.valToPos(data[0][Math.max(first, Math.min(last, to))], 'x'), top: u.over.clientHeight / 2 });
    } else if (onZoom && event.key === '+') {
      const half = (u.scales.x.max - u.scales.x.min) / 8; // zooms to a quarter of the range
      onZoom([data[0][index] - half, data[0][index] + half]);
    } else if (onZoom && event.key === '-') onZoom(null);
    else return;
    event.preventDefault();
  };
  const { min, max } = plot.current?.scales.x ?? {};
  const where = at !== null && placeText(axis, data[0][index], (max - min) / 200);
  const shown = curves.map((curve, n) => ({ name: curve.name, value: textAt(curve, data[0][index]) ?? lastUpTo(data[1 + columnOf(curves, n, smooth)], index) }));
  // A screen reader reads values when the arrow keys move through them, but not when the mouse moves.
  return html`<div class="plot" ref=${box} role="application" aria-roledescription="curve" tabindex="0" aria-label=${`${label}. Arrow keys go through its values${onZoom ? ', + and - zoom' : ''}.`} onKeyDown=${key} onBlur=${() => setIsRead(false)}></div>
    <div class="keys" aria-live=${isRead ? 'polite' : 'off'}>${curves.length > 1
      ? html`${where && html`<span class="soft">${where}</span>`}${shown.map(({ name, value }, n) => html`<span key=${name} class=${`colour-${n % NUM_COLOURS}`}><span class="swatch"></span>${name} <b>${number(value)}</b></span>`)}`
      : shown.length === 1 && html`<span class="soft">${where || 'last'} <b>${number(shown[0].value)}</b></span>`}</div>`;
}

// The text of the last point up to x if it is not a number, else null.
function textAt({ xs, texts = [] }, x) {
  let i = xs.length - 1;
  while (i >= 0 && xs[i] > x) i -= 1;
  return texts[i] ?? null;
}

function lastUpTo(values, index) {
  for (let i = index; i >= 0 && i > index - 400; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

// Each curve has one column, or two if the raw values are drawn behind the smoothed ones.
const columnOf = (curves, n, smooth) => (smooth ? 2 * n + 1 : n);

function aligned(curves, smooth, log) {
  const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = [];
  for (const { xs, ys } of curves) {
    const raw = positive(ys);
    tables.push(smooth ? [xs, raw, positive(smoothed(xs, ys, smooth))] : [xs, raw]);
  }
  for (const { band } of curves) if (band) tables.push([band.xs, positive(band.high), positive(band.low)]);
  if (!tables.length) return [[]];
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

function options(box, current, curves, { log, axis, smooth, sync, setAt }) {
  const text = colour('soft');
  const line = colour('grid-line');
  const series = [{}];
  const bands = [];
  curves.forEach((_, n) => {
    const stroke = colour(`colour-${n % NUM_COLOURS}`);
    if (smooth) series.push({ stroke: faint(stroke, 0.3), width: 1, spanGaps: true, points: { show: false } });
    series.push({ stroke, width: 1.6, spanGaps: true, points: { show: (u, i) => u.data[i].filter((value) => value !== null && value !== undefined).length < 30, size: 5 } });
  });
  curves.forEach(({ band }, n) => {
    if (!band) return;
    const stroke = colour(`colour-${n % NUM_COLOURS}`);
    bands.push({ series: [series.length, series.length + 1], fill: faint(stroke, 0.18) });
    for (let i = 0; i < 2; i += 1) series.push({ stroke: faint(stroke, 0.35), width: 1, spanGaps: true, points: { show: false } });
  });
  let widest = 0; // label on the x axis: half of it extends beyond its tick
  const look = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  return {
    width: box.clientWidth || 300,
    height: box.clientHeight || 200,
    series,
    bands,
    padding: [6, () => Math.max(14, 3 * widest), 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (u, low, high) => shownRange(axis, ...(current.current.range ?? [low, high])) },
      y: log ? { distr: 3 } : { range: (u, low, high) => (low || high ? uPlot.rangeNum(low, high, 0.1, true) : [0, 1]) },
    },
    axes: [
      {
        ...look,
        size: 26,
        // If all points have the same x, only this x has a tick.
        splits: (u, _, low, high) => (u.data[0][0] === u.data[0].at(-1) ? u.data[0].slice(0, 1) : ticks(axis, low, high, box.clientWidth - VALUES_SIZE)),
        values: (u, places) => {
          const texts = tickLabels(axis, places);
          widest = Math.max(0, ...texts.map((one) => one.length));
          return texts;
        },
      },
      {
        ...look,
        size: (u, texts) => Math.max(VALUES_SIZE, 14 + 6.5 * Math.max(0, ...(texts ?? []).map((one) => one.length))),
        values: (u, splits, _, space, difference) => splits.map((value) => (value === null ? '' : shortNumber(value, log ? null : difference))),
      },
    ],
    cursor: {
      sync: sync ? { key: sync } : undefined,
      drag: { x: true, y: false, setScale: false },
      points: { size: 7 },
    },
    hooks: {
      setCursor: [(u) => setAt(u.cursor.idx ?? null)],
      setSelect: [(u) => {
        const { left, width } = u.select;
        if (width < 4) return;
        const range = [u.posToVal(left, 'x'), u.posToVal(left + width, 'x')];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        current.current.onZoom?.(range);
      }],
      ready: [(u) => u.over.addEventListener('dblclick', () => current.current.onZoom?.(null))],
      drawClear: [(u) => drawMarks(u, current.current.marks, text)],
    },
  };
}

function drawMarks(u, marks, stroke) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.globalAlpha = 0.55;
  ctx.setLineDash([4, 4]);
  for (const { x } of marks) {
    const left = Math.round(u.valToPos(x, 'x', true));
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

const faint = (rgb, alpha) => `rgba(${rgb.match(/[\d.]+/g).slice(0, 3).join(', ')}, ${alpha})`;
