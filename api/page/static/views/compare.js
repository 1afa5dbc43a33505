// Jobs beside each other: what `/v1/compare` says of them, and their curves in one picture.

import { address, adjust } from '../lib/address.js';
import { get } from '../lib/api.js';
import { bytes, duration, number } from '../lib/format.js';
import { html, useEffect, useState } from '../lib/html.js';
import { repeat } from '../lib/live.js';
import { LiveSeries, secondsOf, sentOf } from '../lib/series.js';
import { useStore } from '../lib/stores.js';
import { Chart, NUM_COLOURS, Swatch, asNumber, drawn } from '../parts/chart.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { ENDED, State, Tags, costOf, goodputOf, isArrayId, isJobId, nameOf, toJob, valueText } from '../parts/job_parts.js';
import { inOrder } from './job/curves.js';
import { SweepView } from './sweep.js';

const MOST = 20;
const EVERY_MS = 4000;
// What curves are drawn against, besides steps: for the series of a job, the place of a step.
const AXES = { seconds: secondsOf, bytes: sentOf };
// Metrics of which less is better, and of which more is; of others neither end is the best one.
const LESS = /loss|error|perplexity|_time_s|wait_s|(^|[/_])(mae|mse|rmse)$/;
const MORE = /accuracy|samples_per_s|tokens_per_s|(^|[/_])(auc|f1|iou|r2|map|bleu|dice|precision|recall)/;

export function ComparePage() {
  const { params } = useStore(address);
  const sweep = params.get('sweep');
  return sweep && isArrayId(sweep) ? html`<${SweepView} id=${sweep} />` : html`<${Comparison} params=${params} />`;
}

// The comparison and the series of its jobs, with `times` also when steps were done; asked for anew
// while one of them is live.
function useComparison(ids, times) {
  const [state, setState] = useState({ found: null, series: {}, error: null });
  const key = ids.join();
  useEffect(() => {
    setState({ found: null, series: {}, error: null });
    if (!key) return undefined;
    const controller = new AbortController();
    const live = new Map();
    repeat(async (signal) => {
      const found = await get('v1/compare', { jobs: key }, signal);
      // The baseline may be none of those that were asked for.
      for (const { id } of found.jobs) {
        if (!live.has(id)) live.set(id, new LiveSeries(id, { times }));
        await live.get(id).read(signal);
      }
      if (!signal.aborted) setState({ found, series: Object.fromEntries([...live].map(([id, one]) => [id, one.series])), error: null });
      return found.jobs.every((job) => ENDED.has(job.state));
    }, { every: EVERY_MS, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [key, times]);
  return state;
}

function Comparison({ params }) {
  const ids = [...new Set((params.get('jobs') || '').split(',').filter(isJobId))].slice(0, MOST);
  const x = Object.hasOwn(AXES, params.get('x')) ? params.get('x') : '';
  const { found, series, error } = useComparison(ids, x === 'seconds');
  const [range, setRange] = useState(null);
  const log = params.get('log') === '1';
  const smooth = Number(params.get('smooth')) || 0;
  useEffect(() => setRange(null), [x]);
  if (!ids.length) return html`<h1>Compare</h1><${Empty}>Choose two jobs or more in <a href="#/jobs">the list of jobs</a>.<//>`;
  if (!found) return html`<h1>Compare</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const { jobs, baseline } = found;
  const keys = inOrder(new Set(jobs.flatMap(({ id }) => Object.keys(series[id]))));
  const curveOf = curves(jobs, series, AXES[x]);
  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">Compare ${jobs.length} jobs</h1></header><${Failure} error=${error} />
    <div class="card"><table class="compared"><thead><tr><th>Job</th><th>State</th><th>Experiment</th><th class="num">Waited</th><th class="num">Ran</th><th class="num">Workers</th><th class="num">Goodput</th><th class="num">Cost</th><td></td></tr></thead><tbody>
      ${jobs.map((job, n) => html`<tr key=${job.id} class=${job.id === baseline ? 'baseline' : ''}><td><${Swatch} n=${n} /><a href=${toJob(job.id)} title=${job.id}>${nameOf(job)}</a>
          ${job.id === baseline && html` <strong class="note">baseline</strong>`} <${Tags} tags=${job.tags} /></td><td><${State} job=${job} /></td>
        <td>${job.experiment ?? '–'}</td><td class="num">${duration(job.waited_s)}</td><td class="num">${duration(job.ran_s)}</td>
        <td class="num">${job.world_size}</td><td class="num">${goodputOf(job)}</td><td class="num">${costOf(job) ?? '–'}</td>
        <td class="num">${ids.includes(job.id) && html`<button class="quiet" aria-label=${`Leave out ${nameOf(job)}`} onClick=${() => adjust({ jobs: ids.filter((id) => id !== job.id).join(',') })}>×</button>`}</td></tr>`)}</tbody></table></div>
    <div class="toolbar"><div class="segments" role="group" aria-label="Axis">
        ${['', ...Object.keys(AXES)].map((name) => html`<button key=${name} aria-pressed=${x === name} onClick=${() => adjust({ x: name })}>${name || 'steps'}</button>`)}</div>
      <label><input type="checkbox" checked=${log} onChange=${(event) => adjust({ log: event.target.checked ? '1' : '' })} /> log scale</label>
      <label>smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smooth} onInput=${(event) => adjust({ smooth: Number(event.target.value) || '' })} /></label>
      ${range && html`<button onClick=${() => setRange(null)}>Show all</button>`}</div>
    <div class="panels">${keys.map((key) => html`<section key=${key} class="panel" aria-label=${key}><h2 class="minor">${key}</h2>
      <${Chart} curves=${curveOf(key)}
        log=${log} smooth=${smooth} range=${range} onZoom=${setRange} axis=${x || 'step'} sync="compare" label=${`${key} of ${jobs.length} jobs`} /></section>`)}</div>
    <${KeepingInStep} jobs=${jobs} baseline=${baseline} sync=${found.sync} />
    <h2>Metrics</h2><p class="soft">The newest value${baseline ? ', its difference to the baseline,' : ''} and the best one, or the range, with steps.</p>
    <${Table} label="Metrics of each job" jobs=${jobs} baseline=${baseline} rows=${inOrderBy(found.metrics).map(rowOfMetric)} />
    <h2>What differs in the documents</h2>
    ${found.differences.length ? html`<${Table} label="Fields that differ" jobs=${jobs} baseline=${baseline} rows=${found.differences.map(({ pointer, values }) => ({ name: pointer, cells: values.map((value) => ({ said: valueText(value) })) }))} />` : html`<p class="soft">Nothing.</p>`}
  </section>`;
}

// For a metric, the curve of each job. axis: as in AXES; without one, steps. A job whose steps have no
// place on it has no curve.
function curves(jobs, series, axis) {
  const places = jobs.map(({ id }) => (axis ? axis(series[id]) : (step) => step));
  return (key) => jobs.map((job, n) => {
    const { steps, values } = (places[n] && series[job.id][key]) || { steps: [], values: [] };
    return { name: nameOf(job), xs: steps.map((step) => places[n](step)), ...drawn(values) };
  });
}

// What keeping the copies of the model in step cost, if the jobs did it in different ways, or told of it.
function KeepingInStep({ jobs, baseline, sync }) {
  const told = sync.some((one) => one && one.sent_bytes !== null);
  if (!told && new Set(sync.map((one) => one?.topology)).size < 2) return null;
  const row = (name, of) => ({ name, cells: sync.map((one) => ({ said: one ? of(one) : '–' })) });
  const rows = [
    row('kept in step by', (one) => one.topology),
    row('steps', (one) => number(one.steps)),
    row('samples a second', (one) => number(one.samples_per_s)),
    row('bytes sent a step', (one) => bytes(one.sent_bytes)),
    row('staleness, mean', (one) => number(one.staleness_mean)),
    row('staleness, most', (one) => number(one.staleness_max)),
    row('distance from consensus', (one) => number(one.consensus_distance)),
    row('val/loss', (one) => number(one.loss)),
  ];
  return html`<h2>Cost of keeping in step</h2><p class="soft">Bytes are those of all ranks together. Staleness counts what others changed between the reading of weights and the update with their gradient.</p>
    <${Table} label="Cost of keeping in step" jobs=${jobs} baseline=${baseline} rows=${rows} />`;
}

function inOrderBy(metrics) {
  const byKey = new Map(metrics.map((one) => [one.key, one]));
  return inOrder(byKey.keys()).map((key) => byKey.get(key));
}

// A metric as a row of cells; the job that came furthest is marked where it is known which end is best.
function rowOfMetric({ key, values, changes }) {
  const end = LESS.test(key) ? 'min' : MORE.test(key) ? 'max' : null;
  const bests = end ? values.map((one) => asNumber(one?.[end])).filter((value) => value !== null) : [];
  const best = new Set(bests).size > 1 ? Math[end](...bests) : null;
  const cells = values.map((one, n) => {
    if (!one) return { said: '–' };
    const more = end ? `best ${number(one[end])} at ${number(one[`${end}_step`])}` : `${number(one.min)} to ${number(one.max)}`;
    const change = changes[n];
    return { said: number(one.last), more, change: change ? `${change > 0 ? '+' : '-'}${number(Math.abs(change))}` : '', isBest: best !== null && one[end] === best };
  });
  return { name: key, cells };
}

function Table({ label, jobs, baseline, rows }) {
  return html`<div class="card" role="region" aria-label=${label} tabindex="0"><table class="differs"><thead><tr><td></td>${jobs.map((job, n) => html`<th key=${job.id} class=${`num colour-${n % NUM_COLOURS}`}>${nameOf(job)}${job.id === baseline ? ' (baseline)' : ''}</th>`)}</tr></thead>
    <tbody>${rows.map(({ name, cells }) => html`<tr key=${name}><td><code>${name}</code></td>${cells.map(({ said, more, change, isBest }, n) => html`<td key=${n} class=${`num ${isBest ? 'best' : ''}`}>${said}${
      change && html` <span class="soft">${change}</span>`}${more && html`<br /><small class=${isBest ? '' : 'soft'}>${more}</small>`}</td>`)}</tr>`)}</tbody></table></div>`;
}
