// A chart of one or several curves, drawn by uPlot.

import { DASHED_FROM, NUM_COLOURS, pointed } from '../lib/colours.js';
import { number } from '../lib/format.js';
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { curvesCsv, fileName, plotPng, plotSvg, save } from '../lib/save.js';
import { smoothed } from '../lib/smoothing.js';
import { placeText, shortNumber, shownRange, tickLabels, ticks } from '../lib/ticks.js';
import { inTurn, outOfTurn } from '../lib/turns.js';
import uPlot from '../lib/uplot.js';
import { useMedia, useSeen } from './virtual.js';

const VALUES_SIZE = 50;
const NEAR_PX = 18;
const FADED = 0.25;
const DASH = [7, 4];
// Browsers draw lines of one pixel several times faster than wider lines.
const [WIDTH, THIN] = [1.6, 1];
const MANY = 8; // curves in one chart, from which on they are thin
const OUTSIDE = 0.025; // of the values at each end, if outliers are ignored

// The colour of the curve with this number.
export const Swatch = ({ n }) => html`<span class=${`swatch colour-${n % NUM_COLOURS} ${n % NUM_COLOURS >= DASHED_FROM ? 'dashed' : ''}`}></span>`;

const colour = (name, property = 'color') => {
  const probe = document.createElement('span');
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe)[property];
  probe.remove();
  return found;
};

// How a curve is dashed; an empty list for a solid line.
const dashOf = ({ dash }, n) => dash ?? (n % NUM_COLOURS >= DASHED_FROM ? DASH : []);

export const asNumber = (value) => (typeof value === 'number' ? value : null);

// The values of a series for a curve. `NaN` and infinities are not drawn, but shown as text below the
// chart.
export const drawn = (values) => ({ ys: values.map(asNumber), texts: values.map((value) => (typeof value === 'string' ? value : null)) });

// A chart that is drawn once it comes into view, since a job may have hundreds, and in turn with other charts.
// curves: a list, or a function that returns it; of: what the function depends on.
export function Chart({ of, ...props }) {
  const box = useRef(null);
  const seen = useSeen(box);
  const shown = useTurn(props, of, seen);
  const plot = useMemo(() => shown && html`<${Plot} ...${shown} curves=${typeof shown.curves === 'function' ? shown.curves() : shown.curves} />`, [shown]);
  return html`<div class="chart" ref=${box}>${plot ?? html`<div class="plot"></div>`}</div>`;
}

// The properties with which the chart is drawn: the newest ones, once it is the chart's turn.
function useTurn(props, of, on) {
  const [shown, setShown] = useState({ props: null, key: null, of: null });
  const { curves, onZoom, saver, ...plain } = props;
  const key = JSON.stringify(plain);
  const isNewest = shown.props && shown.key === key && (of ? of.every((one, n) => Object.is(one, shown.of?.[n])) : shown.props.curves === curves);
  const own = useRef({});
  useEffect(() => {
    if (on && !isNewest) inTurn(own.current, () => setShown({ props, key, of }));
  });
  useEffect(() => () => outOfTurn(own.current), []);
  return shown.props;
}

// curves: [{name, id, colour, xs, ys, texts, band: {xs, low, high}}], texts from `drawn`; `id` is the job of the
// curve, `colour` its number, by default its position, and `dash` the lengths of its dashes, by default those
// of the colour. marks: [{x}], drawn as dashed lines. axis: the
// kind of x, as in ticks.js. range: [from, to] of x, or null for all; yRange: the same of y, each of them null
// for a limit that fits; inner: whether limits that fit leave out outliers. onZoom: called with [from, to] when the reader drags over a part. saver: a ref that
// becomes a function from `png`, `svg` or `csv`, which saves the chart.
function Plot({ curves, marks = [], log = false, smooth = 0, kind = '', range = null, yRange = null, inner = false, onZoom, axis = 'step', sync, label, title = label, saver }) {
  const box = useRef(null);
  const plot = useRef(null);
  const newest = useRef([]);
  const [at, setAt] = useState(null);
  const isDark = useMedia('(prefers-color-scheme: dark)');
  const current = useRef({});
  const smooths = useMemo(() => curves.map(({ xs, ys }) => (smooth ? smoothed(xs, ys, smooth, kind) : ys)), [curves, smooth, kind]);
  const data = useMemo(() => aligned(curves, smooth ? smooths : null, log), [curves, smooths, log]);
  const colours = curves.map((curve, n) => curve.colour ?? n);
  current.current = { marks, range, yRange, inner, onZoom, data, curves };
  const shape = JSON.stringify([curves.map(({ name, id, dash, band }) => [name, id, dash, Boolean(band)]), colours, log, axis, Boolean(smooth), isDark, sync]);
  const y = JSON.stringify([yRange, inner]);

  useLayoutEffect(() => {
    const made = new uPlot(options(box.current, current, curves, colours, { log, axis, smooth, sync, setAt }), current.current.data, box.current);
    plot.current = made;
    newest.current = [data, range, y];
    const watch = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: box.current.clientHeight }));
    watch.observe(box.current);
    // The plot at which the reader points shows it at once.
    const unmark = pointed.subscribe((id) => {
      const show = () => mark(made, current.current.curves, smooth, pointed.value);
      if (made.over.matches(':hover')) show();
      else inTurn(made, show);
    });
    return () => {
      unmark();
      outOfTurn(made);
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    // Skip this if only the cursor has moved, which also renders this component.
    if (newest.current[0] === data && newest.current[1] === range && newest.current[2] === y) return;
    newest.current = [data, range, y];
    plot.current.setData(data);
  });
  if (saver) saver.current = (format) => saveAs(format, plot.current, { curves, colours, axis, smooth, title });

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
  const shown = curves.map((curve, n) => ({ name: curve.name, id: curve.id, value: valueAt(curve, smooths[n], data[0][index]) }));
  // A screen reader reads values when the arrow keys move through them, but not when the mouse moves.
  return html`<div class="plot" ref=${box} role="application" aria-roledescription="curve" tabindex="0" aria-label=${`${label}. Arrow keys go through its values${onZoom ? ', + and - zoom' : ''}.`} onKeyDown=${key} onBlur=${() => setIsRead(false)}></div>
    <div class="keys" aria-live=${isRead ? 'polite' : 'off'}>${curves.length > 1
      ? html`${where && html`<span class="soft">${where}</span>`}${shown.map(({ name, id, value }, n) => html`<span key=${id ? `${id} ${name}` : name} onPointerEnter=${() => id && pointed.set(id)} onPointerLeave=${() => id && pointed.set(null)}><${Swatch} n=${colours[n]} />${name} <b>${number(value)}</b></span>`)}`
      : shown.length === 1 && html`<span class="soft">${where || 'last'} <b>${number(shown[0].value)}</b></span>`}</div>`;
}

// The value of a curve at the last of its points up to x: a number, or the text of a value that is not finite.
function valueAt({ xs, texts = [] }, values, x) {
  let [i, end] = [0, xs.length];
  while (i < end) {
    const middle = (i + end) >> 1;
    if (xs[middle] <= x) i = middle + 1;
    else end = middle;
  }
  for (i -= 1; i >= 0; i -= 1) {
    const found = texts[i] ?? values[i];
    if (found !== null && found !== undefined) return found;
  }
  return null;
}

// Each curve has one column, or two if the raw values are drawn behind the smoothed ones.
const columnOf = (n, smooth) => (smooth ? 2 * n + 1 : n);

function aligned(curves, smooths, log) {
  const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = curves.map(({ xs, ys }, n) => (smooths ? [xs, positive(ys), positive(smooths[n])] : [xs, positive(ys)]));
  for (const { band } of curves) if (band) tables.push([band.xs, positive(band.high), positive(band.low)]);
  if (!tables.length) return [[]];
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

// Fade all curves but that of the job that the reader points at, in a plot that is in view.
function mark(u, curves, smooth, id) {
  const { top, bottom } = u.root.getBoundingClientRect();
  if (bottom < 0 || top > innerHeight) return;
  const n = id === null ? -1 : curves.findIndex((curve) => curve.id === id);
  u.setSeries(n < 0 ? null : 1 + columnOf(n, smooth), { focus: n >= 0 }, false);
}

// The limits of the y axis: the limits that the reader gave, else limits that fit.
function shownY(low, high, [least, most] = [null, null], log = false) {
  const [from, to] = log ? uPlot.rangeLog(low > 0 ? low : 0.1, high > 0 ? high : 1, 10, false) : low || high ? uPlot.rangeNum(low, high, 0.1, true) : [0, 1];
  const [bottom, top] = [log && !(least > 0) ? from : least ?? from, log && !(most > 0) ? to : most ?? to];
  return bottom < top ? [bottom, top] : [from, to];
}

// The middle 95% of the values in view: [low, high]; null without values.
function middleOf(u) {
  const [first, last] = u.series[0].idxs ?? [0, u.data[0].length - 1];
  const found = [];
  for (const values of u.data.slice(1)) for (let i = first; i <= last; i += 1) if (Number.isFinite(values[i])) found.push(values[i]);
  if (!found.length) return null;
  const sorted = Float64Array.from(found).sort();
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return [at(OUTSIDE), at(1 - OUTSIDE)];
}

function options(box, current, curves, colours, { log, axis, smooth, sync, setAt }) {
  const text = colour('soft');
  const line = colour('grid-line');
  const series = [{}];
  const bands = [];
  curves.forEach((curve, n) => {
    const stroke = colour(`colour-${colours[n] % NUM_COLOURS}`);
    if (smooth) series.push({ stroke: faint(stroke, 0.3), width: 1, spanGaps: true, points: { show: false } });
    series.push({ stroke, width: curves.length > MANY ? THIN : WIDTH, dash: dashOf(curve, colours[n]), spanGaps: true, points: { show: (u, i) => u.data[i].filter((value) => value !== null && value !== undefined).length < 30, size: 5 } });
  });
  curves.forEach(({ band }, n) => {
    if (!band) return;
    const stroke = colour(`colour-${colours[n] % NUM_COLOURS}`);
    bands.push({ series: [series.length, series.length + 1], fill: faint(stroke, 0.18) });
    for (let i = 0; i < 2; i += 1) series.push({ stroke: faint(stroke, 0.35), width: 1, spanGaps: true, points: { show: false } });
  });
  let widest = 0; // label on the x axis: half of it extends beyond its tick
  const shownTicks = { x: { places: [], texts: [] }, y: { places: [], texts: [] } };
  box.ticks = shownTicks;
  const look = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  return {
    width: box.clientWidth || 300,
    height: box.clientHeight || 200,
    series,
    bands,
    padding: [6, () => Math.max(14, 3 * widest), 0, 0],
    legend: { show: false },
    focus: { alpha: FADED },
    scales: {
      x: { time: false, range: (u, low, high) => shownRange(axis, ...(current.current.range ?? [low, high])) },
      y: { distr: log ? 3 : 1, range: (u, low, high) => shownY(...(current.current.inner ? middleOf(u) ?? [low, high] : [low, high]), current.current.yRange ?? undefined, log) },
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
          shownTicks.x = { places, texts };
          return texts;
        },
      },
      {
        ...look,
        size: (u, texts) => Math.max(VALUES_SIZE, 14 + 6.5 * Math.max(0, ...(texts ?? []).map((one) => one.length))),
        values: (u, splits, _, space, difference) => {
          const texts = splits.map((value) => (value === null ? '' : shortNumber(value, log ? null : difference)));
          shownTicks.y = { places: splits, texts };
          return texts;
        },
      },
    ],
    cursor: {
      sync: sync ? { key: sync, filters: { sub: (type, other, left) => type !== 'mouseleave' && !(left < 0), pub: () => true } } : undefined,
      drag: { x: true, y: false, setScale: false },
      // uPlot would show all of x in all plots at once; `onZoom` does it in turn.
      bind: { dblclick: () => null },
      points: { size: 7 },
      focus: { prox: curves.some(({ id }) => id) ? NEAR_PX : -1 },
    },
    hooks: {
      setCursor: [(u) => setAt(u.cursor.idx ?? null)],
      // The reader points at a curve of this plot; `i` is null if none is near.
      setSeries: [(u, i) => {
        const n = i === null ? -1 : Math.floor((i - 1) / (smooth ? 2 : 1));
        pointed.set(current.current.curves[n]?.id ?? null);
      }],
      setSelect: [(u) => {
        const { left, width } = u.select;
        if (width < 4) return;
        const range = [u.posToVal(left, 'x'), u.posToVal(left + width, 'x')];
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        current.current.onZoom?.(range);
      }],
      ready: [(u) => {
        u.over.addEventListener('dblclick', () => current.current.onZoom?.(null));
        u.over.addEventListener('pointerleave', () => {
          pointed.set(null);
          // The cursors of the other plots disappear in turn.
          for (const other of sync ? uPlot.sync(sync).plots : []) if (other !== u) inTurn(other.over, () => other.root.isConnected && other.setCursor({ left: -10, top: -10 }, true, false));
        });
      }],
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

// Save what the chart shows. The CSV has the values without smoothing.
async function saveAs(format, u, { curves, colours, axis, smooth, title }) {
  if (!u) return;
  if (format === 'csv') {
    const { min, max } = u.scales.x;
    save(fileName(title, 'csv'), curvesCsv(curves, axis, [min, max]));
    return;
  }
  const look = { background: colour('card-colour'), text: colour('text-colour'), grid: colour('grid-line') };
  const shown = curves.map((curve, n) => ({
    name: curve.name,
    stroke: colour(`colour-${colours[n] % NUM_COLOURS}`),
    dash: dashOf(curve, colours[n]),
    lines: [u.data[1 + columnOf(n, smooth)], ...(smooth ? [u.data[columnOf(n, smooth)]] : [])],
  }));
  const blob = format === 'png' ? await plotPng(u, title, shown, look) : plotSvg(u, title, shown, u.root.parentElement.ticks, look);
  save(fileName(title, format), blob);
}
