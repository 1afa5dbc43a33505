// Parallel coordinates: each run is a line over axes of its values. The reader selects runs by a range of an axis.

import { html, useRef, useState } from '../lib/html.js';
import { isWithin, rangeOf, sharesOf } from '../lib/run_axes.js';
import { Described, describe, short, useHighlight, useWidth } from './run_plots.js';

const HEIGHT = 332;
const [TOP, BOTTOM, SIDE] = [46, 14, 60];
const AXIS_WIDTH = 160;
const NUM_THICK = 8;
const STEP = 0.05; // of an axis, for a press of an arrow key
const SHORTEST = 0.02; // of an axis: a shorter drag is a click, which selects all runs

// runs: [{id, title, state, n, values}], best first, `n` the number of the colour if the run has one. axes: of
// run_axes.js. brushes: ranges by name; onBrush(name, range) sets one, or removes it if both ends are null.
export function Coordinates({ runs, axes, brushes, onBrush, label }) {
  const box = useRef(null);
  const width = useWidth(box);
  const names = axes.map(({ name }) => name);
  const selected = runs.filter(({ values }) => isWithin(values, axes, brushes));
  const isSelected = new Set(selected.map(({ id }) => id));
  const { current, isPointed, move, option } = useHighlight(selected, box);
  const shown = selected[current];
  const all = Math.max(width, 2 * SIDE + AXIS_WIDTH * (axes.length - 1));
  const x = (n) => (axes.length > 1 ? SIDE + (n * (all - 2 * SIDE)) / (axes.length - 1) : all / 2);
  const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
  const points = ({ values }) => axes.map((axis, n) => [x(n), axis.share(values[axis.name]), values[axis.name]]).filter(([, share]) => Number.isFinite(share));
  const pathOf = (run) => points(run).map(([left, share], i) => `${i ? 'L' : 'M'}${left.toFixed(1)} ${y(share).toFixed(1)}`).join('');
  const line = (run, n) => {
    const isThick = run.n !== undefined && n < NUM_THICK;
    const path = pathOf(run);
    return html`<g key=${run.id} class=${`trial ${run.n === undefined ? 'soft' : `colour-${run.n}`} ${isThick ? 'good' : ''} ${isPointed && n === current ? 'pointed' : ''}`} ...${option(n, `${run.title}, ${run.state}: ${describe(run, names)}`)}><path class="near" d=${path} /><path d=${path} /></g>`;
  };
  // The best runs are drawn last, above the others. The arrow keys go from the best to the worst.
  return html`<div class="card lines" ref=${box}>
    <svg width=${all} height=${HEIGHT} viewBox=${`0 0 ${all} ${HEIGHT}`}>
      <g aria-hidden="true">${axes.map((axis, n) => html`<g key=${axis.name} class="axis"><line x1=${x(n)} x2=${x(n)} y1=${y(0)} y2=${y(1)} />
        <text x=${x(n)} y="16" text-anchor=${n === 0 ? 'start' : n === axes.length - 1 ? 'end' : 'middle'} dx=${n === 0 ? 6 - SIDE : n === axes.length - 1 ? SIDE - 6 : 0}><title>${axis.name}</title>${axis.name.length > 22 ? `…${axis.name.slice(-21)}` : axis.name}</text></g>`)}
        ${runs.filter(({ id }) => !isSelected.has(id)).map((run) => html`<path key=${run.id} class="left-out" d=${pathOf(run)} />`)}</g>
      <g role="listbox" aria-label=${label} onKeyDown=${move}>${selected.map((run, n) => line(run, n)).reverse()}</g>
      <g class="axis ticks" aria-hidden="true">${axes.map((axis, n) => axis.ticks.map((tick) => html`<text key=${JSON.stringify(tick)} x=${x(n)} y=${y(axis.share(tick))} dx=${n === axes.length - 1 ? 8 : -8} dy="4" text-anchor=${n === axes.length - 1 ? 'start' : 'end'}>${short(tick)}</text>`))}</g>
      ${axes.map((axis, n) => html`<${Brush} key=${axis.name} axis=${axis} x=${x(n)} y=${y} range=${brushes.get(axis.name)} onChange=${(range) => onBrush(axis.name, range)} />`)}
      ${isPointed && shown && html`<g class="values" aria-hidden="true">${points(shown).map(([left, share, value], n) => html`<g key=${n}><circle cx=${left} cy=${y(share)} r="4" /><text x=${left} y=${y(share) - 9} text-anchor="middle">${short(value)}</text></g>`)}</g>`}
    </svg>
    <${Described} run=${isPointed ? shown : null} names=${names} hint="Point at a line, or use the arrow keys to go through the runs; Enter opens a run. The best runs are coloured. Drag along an axis, or move the handles at its ends, to select runs." /></div>`;
}

// The selected range of an axis, with a handle at each end. `range` is [low, high] of the axis's values.
function Brush({ axis, x, y, range, onChange }) {
  const [drag, setDrag] = useState(null);
  const [low, high] = drag ?? sharesOf(axis, range);
  const shareAt = (event) => {
    const { top, height } = event.currentTarget.ownerSVGElement.getBoundingClientRect();
    const at = ((event.clientY - top) / height) * HEIGHT;
    return Math.max(0, Math.min(1, 1 - (at - TOP) / (HEIGHT - TOP - BOTTOM)));
  };
  const from = useRef(null);
  const begin = (event) => {
    if (event.button) return;
    event.preventDefault();
    event.currentTarget.setPointerCapture(event.pointerId);
    from.current = shareAt(event);
  };
  const draw = (event) => {
    if (from.current === null) return;
    const to = shareAt(event);
    setDrag([Math.min(from.current, to), Math.max(from.current, to)]);
  };
  const end = () => {
    if (from.current === null) return;
    from.current = null;
    setDrag(null);
    if (drag) onChange(drag[1] - drag[0] < SHORTEST ? [null, null] : rangeOf(axis, drag));
    else if (range) onChange([null, null]);
  };
  const step = axis.choices && axis.choices.length > 1 ? 1 / (axis.choices.length - 1) : STEP;
  const press = (event, n) => {
    const own = n ? high : low;
    const to = { ArrowUp: own + step, ArrowRight: own + step, ArrowDown: own - step, ArrowLeft: own - step, Home: n ? low : 0, End: n ? 1 : high }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const kept = Math.max(n ? low : 0, Math.min(n ? 1 : high, to));
    onChange(rangeOf(axis, n ? [low, kept] : [kept, high]));
  };
  const wordsAt = (share) => (axis.choices ? short(axis.choices[Math.round(axis.place(share))]) : short(axis.place(share)));
  const handle = (n) => {
    const share = n ? high : low;
    return html`<path class="handle" role="slider" tabindex="0" aria-label=${`${n ? 'Largest' : 'Least'} ${axis.name}`} aria-orientation="vertical" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(100 * share)} aria-valuetext=${wordsAt(share)}
      d=${`M${x} ${y(share)}l7 ${n ? -8 : 8}h-14z`} onKeyDown=${(event) => press(event, n)} />`;
  };
  const isWhole = low <= 0 && high >= 1;
  return html`<g class=${`brush ${isWhole ? '' : 'on'}`}>
    <rect class="grip" x=${x - 9} y=${TOP - 8} width="18" height=${HEIGHT - TOP - BOTTOM + 16} onPointerDown=${begin} onPointerMove=${draw} onPointerUp=${end} onPointerCancel=${end}><title>Drag to select runs by ${axis.name}</title></rect>
    ${!isWhole && html`<rect class="range" x=${x - 6} y=${y(high)} width="12" height=${Math.max(2, y(low) - y(high))} />`}
    ${handle(0)}${handle(1)}</g>`;
}
