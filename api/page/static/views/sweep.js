// A sweep: its trials as lines over the searched parameters, and a table of the best trials.

import { go } from '../lib/address.js';
import { get } from '../lib/api.js';
import { coloursOf, pointed } from '../lib/colours.js';
import { metricName } from '../lib/completion.js';
import { plural, whole } from '../lib/format.js';
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { repeat } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { AddToReport, blockOf } from '../parts/add_to_report.js';
import { Swatch } from '../parts/chart.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { State, isOver, toJob, valueText } from '../parts/job_parts.js';

const EVERY_MS = 5000;
const PAGE = 500;
const MOST_TRIALS = 2000;
const NUM_BEST = 20;
const NUM_THICK = 8;
const MOST_COLUMNS = 20; // of a table in a report
const HEIGHT = 332;
const [TOP, BOTTOM, SIDE] = [46, 14, 60];
const AXIS_WIDTH = 160;

// The sweep and its trials, best first, polled until all trials have ended.
function useSweep(id) {
  const [state, setState] = useState({ sweep: null, trials: [], error: null });
  useEffect(() => {
    setState({ sweep: null, trials: [], error: null });
    const controller = new AbortController();
    repeat(async (signal) => {
      const sweep = await get(`v1/sweeps/${id}`, {}, signal);
      const trials = [];
      for (let cursor = null; trials.length < MOST_TRIALS;) {
        const page = await get(`v1/sweeps/${id}/trials`, { limit: PAGE, cursor }, signal);
        trials.push(...page.items);
        cursor = page.next_cursor;
        if (!cursor) break;
      }
      if (!signal.aborted) setState({ sweep, trials: ranked(trials, sweep.mode), error: null });
      return isOver(sweep.counts);
    }, { every: EVERY_MS, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [id]);
  return state;
}

// Trials that failed or were stopped early are never the best, whatever their value.
const counts = ({ state, reason, value }) => value !== null && state !== 'FAILED' && reason.code !== 'stopped_early';

function ranked(trials, mode) {
  const sign = mode === 'min' ? 1 : -1;
  const key = (trial) => (trial.value === null ? Infinity : sign * trial.value);
  return trials.sort((a, b) => counts(b) - counts(a) || (key(a) === key(b) ? a.index - b.index : key(a) - key(b)));
}

// The best trials as a table and a chart of a report.
function blocksOf(sweep, { metric, mode, by }, names) {
  const column = by === 'last' ? metricName(metric) : `best:${metricName(metric)}`;
  const sort = mode === 'min' ? column : `-${column}`;
  return [blockOf('table', { sweep, sort, columns: [column, ...names].slice(0, MOST_COLUMNS).join(',') }), blockOf('chart', { metrics: [metric], sweep, sort, limit: NUM_THICK })];
}

export function SweepView({ id }) {
  const { sweep, trials, error } = useSweep(id);
  if (!sweep) return html`<h1>Sweep</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const names = Object.keys(sweep.sweep.parameters);
  const best = trials.filter(counts).slice(0, NUM_BEST);
  const colours = coloursOf(best.map(({ job_id: jobId, colour, index }) => ({ id: jobId, colour, index, array_id: id })));
  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">${sweep.name || 'Sweep'}</h1><span class="soft">${plural(sweep.size, 'trial')}: ${Object.entries(sweep.counts).map(([state, count]) => `${whole(count)} ${state}`).join(', ')}</span>
      <${AddToReport} blocks=${() => blocksOf(id, sweep, names)} />
      <span class="buttons"><a class="button" href=${`#/jobs?text=${id}`}>All trials in the list</a>
        <button disabled=${best.length < 2} onClick=${() => go(['compare'], { jobs: best.map((one) => one.job_id).join(',') })}>Compare the curves of the best</button></span></header>
    <${Failure} error=${error} />
    <p class="soft">${sweep.mode === 'min' ? 'Lower' : 'Higher'} ${sweep.metric} is better; the ${sweep.by === 'last' ? 'last' : 'best'} value of each trial counts. Sampler: ${sweep.sampler}.
      ${sweep.size > MOST_TRIALS ? ` The first ${whole(MOST_TRIALS)} trials are shown.` : ''}</p>
    ${trials.some(({ parameters }) => parameters) ? html`<${Lines} sweep=${sweep} names=${names} trials=${trials} colours=${colours} />` : html`<${Empty}>No trial has values yet.<//>`}
    <h2>The best trials</h2>
    ${!best.length ? html`<p class="soft">No trial has reported ${sweep.metric} yet.</p>` : html`<div class="card"><table class="trials"><thead><tr><th>Trial</th><th>State</th><th class="num">${sweep.metric}</th><th class="num">Step</th>${names.map((name) => html`<th key=${name} class="num">${name}</th>`)}</tr></thead>
      <tbody>${best.map((trial) => html`<${TrialRow} key=${trial.index} trial=${trial} names=${names} colour=${colours.get(trial.job_id)} />`)}</tbody></table></div>`}
  </section>`;
}

// A trial's row, which is marked while the reader points at its line, and marks the line.
function TrialRow({ trial, names, colour }) {
  const isPointed = useStore(pointed) === trial.job_id;
  return html`<tr class=${`${trial.is_best ? 'baseline' : ''} ${isPointed ? 'pointed' : ''}`} onPointerEnter=${() => pointed.set(trial.job_id)} onPointerLeave=${() => pointed.set(null)}>
    <td><${Swatch} n=${colour} /><a href=${toJob(trial.job_id)} title=${trial.variant}>#${trial.index}</a>${trial.is_best && html` <strong class="note">best</strong>`}</td>
    <td><${State} job=${trial} /></td><td class="num">${valueText(trial.value)}</td><td class="num">${valueText(trial.step)}</td>${names.map((name) => html`<td key=${name} class="num">${valueText(trial.parameters?.[name])}</td>`)}</tr>`;
}

const text = JSON.stringify;

// An axis: the position of a value, from 0 (bottom) to 1 (top), and the values of its ticks.
function axisOf(name, { choices = null, min, max, log = false }) {
  if (choices) {
    const at = new Map(choices.map((choice, n) => [text(choice), choices.length > 1 ? n / (choices.length - 1) : 0.5]));
    const every = Math.ceil(choices.length / 9);
    return { name, at: (value) => at.get(text(value)), ticks: choices.filter((_, n) => n % every === 0) };
  }
  const scale = log ? Math.log : (value) => value;
  const [low, high] = [scale(min), scale(max)];
  const middle = log ? Math.exp((low + high) / 2) : (min + max) / 2;
  const share = (value) => (high > low ? (scale(value) - low) / (high - low) : 0.5);
  return { name, at: (value) => (typeof value === 'number' ? share(value) : NaN), ticks: high > low ? [min, Number(middle.toPrecision(3)), max] : [min] };
}

// Parallel coordinates. The pointer or the arrow keys highlight one trial at a time.
function Lines({ sweep, names, trials, colours }) {
  const box = useRef(null);
  const [width, setWidth] = useState(900);
  const [at, setAt] = useState(0);
  const [isPointed, setIsPointed] = useState(false);
  const pointedId = useStore(pointed);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const drawn = trials.filter(({ parameters }) => parameters);
  const values = drawn.map(({ value }) => value).filter((value) => value !== null);
  const axes = names.map((name) => axisOf(name, sweep.sweep.parameters[name]));
  if (values.length) axes.push(axisOf(sweep.metric, { min: Math.min(...values), max: Math.max(...values) }));
  const all = Math.max(width, 2 * SIDE + AXIS_WIDTH * (axes.length - 1));
  const x = (n) => (axes.length > 1 ? SIDE + (n * (all - 2 * SIDE)) / (axes.length - 1) : all / 2);
  const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
  const valueOf = (trial, n) => (n < names.length ? trial.parameters[names[n]] : trial.value);
  const points = (trial) => axes.map((axis, n) => [x(n), axis.at(valueOf(trial, n)), valueOf(trial, n)]).filter(([, share]) => Number.isFinite(share));
  const described = (trial) => axes.map(({ name }, n) => `${name} ${valueText(valueOf(trial, n))}`).join(', ');
  const current = Math.min(at, drawn.length - 1);
  const shown = drawn[current];
  useEffect(() => {
    const n = drawn.findIndex(({ job_id: jobId }) => jobId === pointedId);
    if (n < 0) return;
    setAt(n);
    setIsPointed(true);
  }, [pointedId]);
  const point = (n, focus) => {
    pointed.set(drawn[n].job_id);
    setAt(n);
    setIsPointed(true);
    if (focus) box.current.querySelector(`[data-n="${n}"]`)?.focus();
  };
  const move = (event) => {
    const to = { ArrowDown: current + 1, ArrowRight: current + 1, ArrowUp: current - 1, ArrowLeft: current - 1, Home: 0, End: drawn.length - 1 }[event.key];
    if (event.key === 'Enter') go(['jobs', shown.job_id]);
    if (to === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(drawn.length - 1, to)), true);
  };
  const line = (trial, n) => {
    const colour = colours.get(trial.job_id);
    const isThick = colour !== undefined && n < NUM_THICK;
    const path = points(trial).map(([left, share], i) => `${i ? 'L' : 'M'}${left.toFixed(1)} ${y(share).toFixed(1)}`).join('');
    return html`<g key=${trial.index} class=${`trial ${colour === undefined ? 'soft' : `colour-${colour}`} ${isThick ? 'good' : ''} ${isPointed && n === current ? 'pointed' : ''}`} role="option" data-n=${n}
      aria-selected=${n === current} aria-posinset=${n + 1} aria-setsize=${drawn.length} tabindex=${n === current ? 0 : -1} aria-label=${`#${trial.index}, ${trial.state}: ${described(trial)}`}
      onPointerEnter=${() => point(n)} onPointerLeave=${() => pointed.set(null)} onFocus=${() => point(n)} onClick=${() => point(n, true)}><path class="near" d=${path} /><path d=${path} /></g>`;
  };
  // The best trials are drawn last, above the others. The arrow keys go from the best to the worst.
  return html`<div class="card lines" ref=${box}>
    <svg width=${all} height=${HEIGHT} viewBox=${`0 0 ${all} ${HEIGHT}`}>
      <g aria-hidden="true">${axes.map((axis, n) => html`<g key=${axis.name} class="axis"><line x1=${x(n)} x2=${x(n)} y1=${y(0)} y2=${y(1)} />
        <text x=${x(n)} y="16" text-anchor=${n === 0 ? 'start' : n === axes.length - 1 ? 'end' : 'middle'} dx=${n === 0 ? 6 - SIDE : n === axes.length - 1 ? SIDE - 6 : 0}><title>${axis.name}</title>${axis.name.length > 22 ? `…${axis.name.slice(-21)}` : axis.name}</text></g>`)}</g>
      <g role="listbox" aria-label="Trials, the best first" onKeyDown=${move}>${drawn.map((trial, n) => line(trial, n)).reverse()}</g>
      <g class="axis ticks" aria-hidden="true">${axes.map((axis, n) => axis.ticks.map((tick) => html`<text key=${text(tick)} x=${x(n)} y=${y(axis.at(tick))} dx=${n === axes.length - 1 ? 6 : -6} dy="4" text-anchor=${n === axes.length - 1 ? 'start' : 'end'}>${short(tick)}</text>`))}</g>
      ${isPointed && html`<g class="values" aria-hidden="true">${points(shown).map(([left, share, value], n) => html`<g key=${n}><circle cx=${left} cy=${y(share)} r="4" /><text x=${left} y=${y(share) - 9} text-anchor="middle">${short(value)}</text></g>`)}</g>`}
    </svg>
    <p class="soft">${isPointed ? html`<a href=${toJob(shown.job_id)}>#${shown.index}</a> <span class="numeric">${shown.state}: ${described(shown)}</span>` : 'Point at a line, or use the arrow keys to go through the trials; Enter opens a trial. The best trials are coloured.'}</p></div>`;
}

function short(value) {
  const shown = valueText(value);
  return shown.length > 12 ? `${shown.slice(0, 11)}…` : shown;
}
