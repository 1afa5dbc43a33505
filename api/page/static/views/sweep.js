// A sweep: its trials as lines over the searched parameters and as dots, the importance of the parameters, and a
// table of the best trials.

import { address, adjust, go } from '../lib/address.js';
import { get } from '../lib/api.js';
import { coloursOf, pointed } from '../lib/colours.js';
import { metricName } from '../lib/completion.js';
import { plural, whole } from '../lib/format.js';
import { html, useEffect, useState } from '../lib/html.js';
import { repeat } from '../lib/live.js';
import { axisOf, brushTexts, brushesIn, isWithin } from '../lib/run_axes.js';
import { useStore } from '../lib/stores.js';
import { AddToReport, blockOf } from '../parts/add_to_report.js';
import { Swatch } from '../parts/chart.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { Coordinates } from '../parts/coordinates.js';
import { Importance } from '../parts/importance.js';
import { Scatter } from '../parts/scatter.js';
import { State, isOver, toJob, valueText } from '../parts/job_parts.js';

const EVERY_MS = 5000;
const PAGE = 500;
const MOST_TRIALS = 2000;
const NUM_BEST = 20;
const MOST_COMPARED = 20;
const NUM_THICK = 8;
const MOST_COLUMNS = 20; // of a table in a report

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
  const { params } = useStore(address);
  const { sweep, trials, error } = useSweep(id);
  if (!sweep) return html`<h1>Sweep</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const names = Object.keys(sweep.sweep.parameters);
  const axes = axesOf(sweep, names, trials);
  const brushes = brushesIn(params);
  const metric = metricOf(sweep);
  const valuesOf = (trial) => ({ ...trial.parameters, [metric]: trial.value });
  const isSelected = (trial) => isWithin(valuesOf(trial), axes, brushes);
  const selected = brushes.size ? trials.filter(isSelected) : trials;
  const best = selected.filter(counts).slice(0, NUM_BEST);
  const colours = coloursOf(best.map(({ job_id: jobId, colour, index }) => ({ id: jobId, colour, index, array_id: id })));
  const runs = trials.filter(({ parameters }) => parameters).map((trial) => ({ id: trial.job_id, title: `#${trial.index}`, state: trial.state, n: colours.get(trial.job_id), values: valuesOf(trial) }));
  const brush = (name, range) => adjust({ brush: brushTexts(new Map([...brushes, [name, range]])) }, true);
  const compared = selected.filter(({ value }) => value !== null).slice(0, MOST_COMPARED);
  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">${sweep.name || 'Sweep'}</h1><span class="soft">${plural(sweep.size, 'trial')}: ${Object.entries(sweep.counts).map(([state, count]) => `${whole(count)} ${state}`).join(', ')}</span>
      <${AddToReport} blocks=${() => blocksOf(id, sweep, names)} />
      <span class="buttons"><a class="button" href=${`#/jobs?text=${id}`}>All trials in the list</a>
        <button disabled=${best.length < 2} onClick=${() => go(['compare'], { jobs: (brushes.size ? compared : best).map((one) => one.job_id).join(',') })}>Compare the curves of the ${brushes.size ? 'selected' : 'best'}</button></span></header>
    <${Failure} error=${error} />
    <p class="soft">${sweep.mode === 'min' ? 'Lower' : 'Higher'} ${sweep.metric} is better; the ${sweep.by === 'last' ? 'last' : 'best'} value of each trial counts. Sampler: ${sweep.sampler}.
      ${sweep.size > MOST_TRIALS ? ` The first ${whole(MOST_TRIALS)} trials are shown.` : ''}</p>
    ${!runs.length ? html`<${Empty}>No trial has values yet.<//>` : html`<${Coordinates} runs=${runs} axes=${axes} brushes=${brushes} onBrush=${brush} label="Trials, the best first" />
    ${brushes.size > 0 && html`<p role="status">${plural(selected.length, 'trial')} of ${whole(trials.length)} selected. <button onClick=${() => adjust({ brush: [] })}>Select all</button></p>`}
    <h2>Two values of each trial</h2>
    <${Scatter} runs=${runs.filter((run) => isWithin(run.values, axes, brushes))} names=${[...names, metric]} params=${params} defaults=${[names[0], metric]} />
    <h2>Importance of the parameters</h2>
    <${Importance} path=${`v1/sweeps/${id}/importance`} params=${params} />`}
    <h2>The best ${brushes.size ? 'selected ' : ''}trials</h2>
    ${!best.length ? html`<p class="soft">${brushes.size ? 'No selected trial' : 'No trial'} has reported ${sweep.metric} yet.</p>` : html`<div class="card"><table class="trials"><thead><tr><th>Trial</th><th>State</th><th class="num">${sweep.metric}</th><th class="num">Step</th>${names.map((name) => html`<th key=${name} class="num">${name}</th>`)}</tr></thead>
      <tbody>${best.map((trial) => html`<${TrialRow} key=${trial.index} trial=${trial} names=${names} colour=${colours.get(trial.job_id)} />`)}</tbody></table></div>`}
  </section>`;
}

// The name of the metric's axis. A script's parameter can have the same name as the metric.
const metricOf = ({ metric, sweep }) => (Object.hasOwn(sweep.parameters, metric) ? `metric ${metric}` : metric);

// The axes of the parameters, which span what the sweep searches, and of the metric.
function axesOf(sweep, names, trials) {
  const axes = names.map((name) => axisOf(name, sweep.sweep.parameters[name]));
  const values = trials.map(({ value }) => value).filter((value) => value !== null);
  if (values.length) axes.push(axisOf(metricOf(sweep), { min: Math.min(...values), max: Math.max(...values) }));
  return axes;
}

// A trial's row, which is marked while the reader points at its line, and marks the line.
function TrialRow({ trial, names, colour }) {
  const isPointed = useStore(pointed) === trial.job_id;
  return html`<tr class=${`${trial.is_best ? 'baseline' : ''} ${isPointed ? 'pointed' : ''}`} onPointerEnter=${() => pointed.set(trial.job_id)} onPointerLeave=${() => pointed.set(null)}>
    <td><${Swatch} n=${colour} /><a href=${toJob(trial.job_id)} title=${trial.variant}>#${trial.index}</a>${trial.is_best && html` <strong class="note">best</strong>`}</td>
    <td><${State} job=${trial} /></td><td class="num">${valueText(trial.value)}</td><td class="num">${valueText(trial.step)}</td>${names.map((name) => html`<td key=${name} class="num">${valueText(trial.parameters?.[name])}</td>`)}</tr>`;
}
