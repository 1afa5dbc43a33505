// A view's charts: the controls above them, and a panel with tools for each. The address keeps all that the
// reader has chosen, so that a link shows the same charts and Back undoes a change. If it has nothing, the layout
// that was saved for the experiment applies.

import { adjust } from '../lib/address.js';
import { AXES, axisOf } from '../lib/axes.js';
import { html, useRef, useState } from '../lib/html.js';
import { optionsOf } from '../lib/layout.js';
import { SMOOTHINGS } from '../lib/smoothing.js';
import { Chart } from './chart.js';
import { Menu } from './common.js';

const numbers = (text) => (text || '').split(':').map((one) => (one === '' ? null : Number(one)));
const isRange = (range) => range.length === 2 && range.every((one) => one === null || Number.isFinite(one)) && range.some((one) => one !== null);
const isNames = (names) => Array.isArray(names) && names.length > 1 && names.every((name) => typeof name === 'string');

function namesIn(text) {
  try {
    const names = JSON.parse(text);
    return isNames(names) ? names : null;
  } catch {
    return null;
  }
}

// The parameters of the address that are part of a layout; `own` marks an address whose other parameters have
// their usual values, although a layout was saved.
export const OWN = ['own', 'x', 'log', 'smooth', 'kind', 'outliers', 'pin', 'chart', 'y'];

const lists = (together) => together.map((one) => JSON.stringify(one));
const limitTexts = (limits) => [...limits].map(([name, range]) => `${range.map((one) => one ?? '').join(':')}:${name}`);
const written = ({ x, log, smooth, kind, outliers, pins, together, limits }) => ({
  own: '1', x, log: log ? '1' : '', smooth: smooth || '', kind, outliers: outliers ? '1' : '', pin: pins, chart: lists(together), y: limitTexts(limits),
});

// The options of the charts, from the address or, if it has none, from the saved layout. range: [from, to] of x, or
// null. limits: [least, most] of y by panel. together: lists of metrics that the reader draws in one chart. isOwn:
// whether the address has options. adjust: changes parameters of the address and keeps the other options.
export function chartOptions(params, layout = null) {
  const isOwn = OWN.some((name) => params.has(name));
  const given = optionsIn(params);
  if (isOwn || !layout) return { ...given, isOwn, adjust };
  const { range } = given;
  const saved = { ...optionsOf(layout), range, isOwn };
  saved.x = Object.hasOwn(AXES, saved.x) ? saved.x : '';
  saved.kind = Object.hasOwn(SMOOTHINGS, saved.kind) ? saved.kind : '';
  saved.smooth = Math.min(0.99, Math.max(0, saved.smooth));
  return { ...saved, adjust: (changes, isTyped) => adjust({ ...written(saved), ...changes }, isTyped) };
}

function optionsIn(params) {
  const range = numbers(params.get('range'));
  const limits = new Map();
  for (const text of params.getAll('y')) {
    const [, bounds, name] = /^([^:]*:[^:]*):([^]*)$/.exec(text) ?? [];
    if (bounds !== undefined && isRange(numbers(bounds))) limits.set(name, numbers(bounds));
  }
  return {
    x: axisOf(params),
    log: params.get('log') === '1',
    smooth: Math.min(0.99, Math.max(0, Number(params.get('smooth')) || 0)),
    kind: Object.hasOwn(SMOOTHINGS, params.get('kind') ?? '') ? params.get('kind') ?? '' : '',
    outliers: params.get('outliers') === '1',
    range: isRange(range) && range.every((one) => one !== null) && range[0] < range[1] ? range : null,
    pins: params.getAll('pin'),
    together: params.getAll('chart').map(namesIn).filter(Boolean),
    limits,
  };
}

// Seven digits distinguish the pixels of any zoom.
const rounded = (value, range) => Number(value.toPrecision(Math.max(7, Math.ceil(Math.log10(Math.abs(value) / (range[1] - range[0]) || 1)) + 4)));
export const zoom = (range) => adjust({ range: range ? range.map((value) => rounded(value, range)).join(':') : '' });

// Panels in the reader's order: pinned ones, combinations of metrics, the others. panels: [{name, members:
// [{key, name}]}] of the view.
export function arranged(panels, { pins, together }) {
  const known = new Map(panels.flatMap(({ members }) => members.map((one) => [one.key, one])));
  const made = together.map((keys) => ({ name: keys.join(', '), keys, members: keys.filter((key) => known.has(key)).map((key) => ({ key, name: key })) }));
  const all = [...made.filter(({ members }) => members.length), ...panels];
  const place = ({ name }) => (pins.includes(name) ? pins.indexOf(name) : pins.length);
  return all.map((panel, n) => ({ panel, n })).sort((a, b) => place(a.panel) - place(b.panel) || a.n - b.n).map(({ panel }) => panel);
}

// offered: the axes that the data has.
export function ChartTools({ options: { x, log, smooth, kind, outliers, range, adjust: change }, offered, children }) {
  return html`<div class="toolbar">${children}
    <label>x axis <select value=${x} onChange=${(event) => change({ x: event.target.value, range: '' })}>
      ${Object.entries(AXES).filter(([name]) => name === x || offered.includes(name)).map(([name, one]) => html`<option key=${name} value=${name} title=${one.title}>${one.name}</option>`)}</select></label>
    <label><input type="checkbox" checked=${log} onChange=${(event) => change({ log: event.target.checked ? '1' : '' })} /> log scale</label>
    <label title="The y axis spans the middle 95% of the values that are in view"><input type="checkbox" checked=${outliers} onChange=${(event) => change({ outliers: event.target.checked ? '1' : '' })} /> ignore outliers</label>
    <label>smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smooth} onInput=${(event) => change({ smooth: Number(event.target.value) || '' }, true)} /></label>
    ${smooth > 0 && html`<select aria-label="Kind of smoothing" value=${kind} onChange=${(event) => change({ kind: event.target.value })}>
      ${Object.entries(SMOOTHINGS).map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}</select>`}
    ${range && html`<button onClick=${() => zoom(null)}>Show all</button>`}</div>`;
}

// A chart with its name and tools. panel: as in `arranged`. metrics: the keys that can be added to it. The other
// properties are passed to Chart.
export function Panel({ panel: { name, keys, members }, options, metrics, children, ...chart }) {
  const box = useRef(null);
  const saver = useRef(null);
  const { pins, together, limits, adjust: change } = options;
  const own = keys ?? members.map(({ key }) => key);
  const others = metrics.filter((key) => !own.includes(key));
  const at = pins.indexOf(name);
  const move = (by) => {
    const moved = pins.filter((other) => other !== name);
    moved.splice(Math.max(0, at + by), 0, name);
    change({ pin: moved });
  };
  const add = (key) => {
    const joined = [...own, key];
    const kept = together.filter((one) => one.join(', ') !== name);
    change({ chart: lists([...kept, joined]), ...(at >= 0 && { pin: pins.map((other) => (other === name ? joined.join(', ') : other)) }) });
  };
  const remove = () => change({ chart: lists(together.filter((one) => one.join(', ') !== name)), pin: pins.filter((other) => other !== name) });
  return html`<section class="panel" ref=${box} aria-label=${name}>
    <div class="panel-head"><h2 class="minor">${name}</h2><${Menu} label=${`Tools of ${name}`}>
      <button onClick=${() => change({ pin: at < 0 ? [...pins, name] : pins.filter((other) => other !== name) })}>${at < 0 ? 'Pin to the top' : 'Unpin'}</button>
      ${at > 0 && html`<button onClick=${() => move(-1)}>Move forward</button>`}
      ${at >= 0 && at < pins.length - 1 && html`<button onClick=${() => move(1)}>Move back</button>`}
      ${document.fullscreenEnabled && html`<button onClick=${() => (document.fullscreenElement ? document.exitFullscreen() : box.current.requestFullscreen())}>Full screen</button>`}
      ${['PNG', 'SVG', 'CSV'].map((format) => html`<button key=${format} onClick=${() => saver.current?.(format.toLowerCase())}>Save as ${format}</button>`)}
      <${Limits} name=${name} limits=${limits} change=${change} />
      ${others.length > 0 && html`<label>Add a metric <select value="" onChange=${(event) => { if (event.target.value) add(event.target.value); }}><option value="">choose …</option>${others.map((key) => html`<option key=${key} value=${key}>${key}</option>`)}</select></label>`}
      ${keys && html`<button onClick=${remove}>Remove this chart</button>`}<//></div>
    <${Chart} ...${chart} log=${options.log} smooth=${options.smooth} kind=${options.kind} range=${options.range} inner=${options.outliers} yRange=${limits.get(name) ?? null} onZoom=${zoom} saver=${saver} title=${name} />
    ${children}</section>`;
}

function Limits({ name, limits, change }) {
  const own = limits.get(name) ?? [null, null];
  const [typed, setTyped] = useState({});
  // What was typed counts until the limits change. It follows each key, because charts are drawn anew meanwhile.
  const draft = typed.limits === own.join() ? typed.values : own.map((one) => one ?? '');
  const edit = (n, event) => {
    const values = draft.map((one, i) => (i === n ? event.target.value : one));
    setTyped({ limits: own.join(), values });
    return values;
  };
  const apply = (next) => {
    const kept = limitTexts([...limits].filter(([other]) => other !== name));
    change({ y: next.some((one) => one !== '') ? [...kept, `${next.join(':')}:${name}`] : kept });
  };
  const field = (n, title) => html`<input type="number" step="any" aria-label=${`${title} of y`} placeholder="fits" value=${draft[n]}
    onInput=${(event) => edit(n, event)} onChange=${(event) => apply(edit(n, event))} />`;
  return html`<div class="limits">y from ${field(0, 'Least value')} to ${field(1, 'Largest value')}</div>`;
}
