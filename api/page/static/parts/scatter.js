// A scatter plot of runs: any two of their values, and the colour of a third.

import { adjust } from '../lib/address.js';
import { html, useRef } from '../lib/html.js';
import { axisOfValues, roundTicks } from '../lib/run_axes.js';
import { NUM_COLOURS } from '../lib/colours.js';
import { Described, describe, short, useHighlight, useWidth } from './run_plots.js';

const HEIGHT = 340;
const [LEFT, RIGHT, TOP, BOTTOM] = [78, 16, 14, 48];
const TICK_WIDTH = 90;
const PER_TICK = 50;

// runs: [{id, title, state, n, values}]. names: of all values. defaults: the names of x and y if the address
// names none.
export function Scatter({ runs, names, params, defaults }) {
  const box = useRef(null);
  const width = useWidth(box);
  const chosen = (key, other) => (names.includes(params.get(key)) ? params.get(key) : other);
  const [nameX, nameY, nameC] = [chosen('sx', defaults[0]), chosen('sy', defaults[1]), chosen('sc', '')];
  const logs = params.get('slog') ?? '';
  const valuesOf = (name) => runs.map(({ values }) => values[name]);
  const [axisX, axisY] = [axisOfValues(nameX, valuesOf(nameX), logs.includes('x')), axisOfValues(nameY, valuesOf(nameY), logs.includes('y'))];
  const axisC = nameC ? axisOfValues(nameC, valuesOf(nameC)) : null;
  const placed = axisX && axisY ? runs.map((run) => ({ ...run, x: axisX.share(run.values[nameX]), y: axisY.share(run.values[nameY]) })).filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y)).sort((a, b) => a.x - b.x || a.y - b.y) : [];
  const { current, isPointed, move, option } = useHighlight(placed, box);
  const shown = placed[current];
  const named = [...new Set([nameX, nameY, nameC].filter(Boolean))];
  const x = (share) => LEFT + 8 + share * (width - LEFT - RIGHT - 16);
  const y = (share) => HEIGHT - BOTTOM - 8 - share * (HEIGHT - TOP - BOTTOM - 16);
  const select = (key, title, value, empty) => html`<label>${title} <select aria-label=${`Value of the ${title}`} value=${value} onChange=${(event) => adjust({ [key]: event.target.value })}>
    ${empty && html`<option value="">${empty}</option>`}${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`;
  const log = (letter, axis) => html`<label><input type="checkbox" checked=${logs.includes(letter)} disabled=${!axis || Boolean(axis.choices)} onChange=${(event) => adjust({ slog: ['x', 'y'].filter((one) => (one === letter ? event.target.checked : logs.includes(one))).join('') })} /> log ${letter}</label>`;
  const missing = runs.length - placed.length;
  return html`<div class="toolbar">${select('sx', 'x axis', nameX)}${log('x', axisX)}${select('sy', 'y axis', nameY)}${log('y', axisY)}${select('sc', 'colour', nameC, 'of the run')}</div>
    <div class="card lines scatter" ref=${box}>
    <svg width=${width} height=${HEIGHT} viewBox=${`0 0 ${width} ${HEIGHT}`}>
      <g class="axis" aria-hidden="true">
        ${axisX && roundTicks(axisX, Math.floor((width - LEFT) / TICK_WIDTH)).map((tick) => html`<g key=${tick.text}><line x1=${x(tick.share)} x2=${x(tick.share)} y1=${TOP} y2=${HEIGHT - BOTTOM} /><text class="tick" x=${x(tick.share)} y=${HEIGHT - BOTTOM + 16} text-anchor="middle">${short(tick.text)}</text></g>`)}
        ${axisY && roundTicks(axisY, Math.floor(HEIGHT / PER_TICK)).map((tick) => html`<g key=${tick.text}><line x1=${LEFT} x2=${width - RIGHT} y1=${y(tick.share)} y2=${y(tick.share)} /><text class="tick" x=${LEFT - 6} y=${y(tick.share) + 4} text-anchor="end">${short(tick.text)}</text></g>`)}
        <text x=${(LEFT + width - RIGHT) / 2} y=${HEIGHT - 8} text-anchor="middle">${nameX}</text>
        <text transform=${`translate(13 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`} text-anchor="middle">${nameY}</text></g>
      <g role="listbox" aria-label=${`Runs by ${nameX} and ${nameY}`} onKeyDown=${move}>${placed.map((run, n) => {
        const { className, style } = lookOf(run, axisC, nameC);
        return html`<g key=${run.id} class=${`dot ${className} ${isPointed && n === current ? 'pointed' : ''}`} style=${style} ...${option(n, `${run.title}, ${run.state}: ${describe(run, named)}`)}><circle cx=${x(run.x)} cy=${y(run.y)} r=${isPointed && n === current ? 8 : 5} /></g>`;
      })}</g>
    </svg>
    ${axisC && html`<${ColourKey} axis=${axisC} />`}
    <${Described} run=${isPointed ? shown : null} names=${named} hint=${`Point at a dot, or use the arrow keys; Enter opens a run.${missing ? ` ${missing} of the runs have no ${nameX === nameY ? nameX : `${nameX} or ${nameY}`} that the axes can show.` : ''}`} /></div>`;
}

// The share of a gradient, as a property of the element: the style sheet has the colours.
const gradient = (share) => ({ '--share': `${Math.round(100 * share)}%` });

function lookOf(run, axis, name) {
  if (!axis) return { className: run.n === undefined ? 'soft' : `colour-${run.n}`, style: undefined };
  const share = axis.share(run.values[name]);
  if (!Number.isFinite(share)) return { className: 'soft', style: undefined };
  if (axis.choices) return { className: `colour-${Math.round(axis.place(share)) % NUM_COLOURS}`, style: undefined };
  return { className: 'graded', style: gradient(share) };
}

function ColourKey({ axis }) {
  if (axis.choices) return html`<p class="keys">${axis.choices.slice(0, NUM_COLOURS).map((choice, n) => html`<span key=${n}><span class=${`disc colour-${n}`}></span> ${short(choice)}</span>`)}</p>`;
  return html`<p class="keys"><span>${axis.name}</span><span class="numeric">${short(axis.min)}</span><span class="gradient" aria-hidden="true">${Array.from({ length: 11 }, (_, n) => html`<span key=${n} class="graded" style=${gradient(n / 10)}></span>`)}</span><span class="numeric">${short(axis.max)}</span></p>`;
}
