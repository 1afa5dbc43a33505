// Compares jobs: the answer of `/v1/compare`, and their curves in shared charts.

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
// The x axes other than steps. Each maps the series of a job to a function from a step to its position.
const AXES = { seconds: secondsOf, bytes: sentOf };
// Metrics for which lower is better, and for which higher is better; others have no best value.
const LESS = /loss|error|perplexity|_time_s|wait_s|(^|[/_])(mae|mse|rmse)$/;
const MORE = /accuracy|samples_per_s|tokens_per_s|(^|[/_])(auc|f1|iou|r2|map|bleu|dice|precision|recall)/;

export function ComparePage() {
  const { params } = useStore(address);
  const sweep = params.get('sweep');
  return sweep && isArrayId(sweep) ? html`<${SweepView} id=${sweep} />` : html`<${Comparison} params=${params} />`;
}

// The comparison and the series of its jobs, with `times` also the times of steps. Polled while one of
// the jobs is live.
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
      // The answer can also contain the baseline.
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
  if (!ids.length) return html`<h1>Compare</h1><${Empty}>Choose two or more jobs in <a href="#/jobs">the list of jobs</a>.<//>`;
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
    <${Synchronization} jobs=${jobs} baseline=${baseline} sync=${found.sync} />
    <h2>Metrics</h2><p class="soft">The newest value${baseline ? ', its difference from the baseline,' : ''} and the best value or the range, with steps.</p>
    <${Table} label="Metrics of each job" jobs=${jobs} baseline=${baseline} rows=${inOrderBy(found.metrics).map(rowOfMetric)} />
    <h2>Differences between the documents</h2>
    ${found.differences.length ? html`<${Table} label="Fields that differ" jobs=${jobs} baseline=${baseline} rows=${found.differences.map(({ pointer, values }) => ({ name: pointer, cells: values.map((value) => ({ text: valueText(value) })) }))} />` : html`<p class="soft">None.</p>`}
  </section>`;
}

// A function from a metric to the curve of each job. axis: one of AXES, or undefined for steps. A job
// whose steps have no position on the axis has no curve.
function curves(jobs, series, axis) {
  const places = jobs.map(({ id }) => (axis ? axis(series[id]) : (step) => step));
  return (key) => jobs.map((job, n) => {
    const { steps, values } = (places[n] && series[job.id][key]) || { steps: [], values: [] };
    return { name: nameOf(job), xs: steps.map((step) => places[n](step)), ...drawn(values) };
  });
}

// The cost of synchronizing the models, if the jobs use different methods or report the cost.
function Synchronization({ jobs, baseline, sync }) {
  const isReported = sync.some((one) => one && one.sent_bytes !== null);
  if (!isReported && new Set(sync.map((one) => one?.topology)).size < 2) return null;
  const row = (name, of) => ({ name, cells: sync.map((one) => ({ text: one ? of(one) : '–' })) });
  const rows = [
    row('synchronized by', (one) => one.topology),
    row('steps', (one) => number(one.steps)),
    row('samples per second', (one) => number(one.samples_per_s)),
    row('bytes sent per step', (one) => bytes(one.sent_bytes)),
    row('staleness, mean', (one) => number(one.staleness_mean)),
    row('staleness, most', (one) => number(one.staleness_max)),
    row('consensus distance', (one) => number(one.consensus_distance)),
    row('val/loss', (one) => number(one.loss)),
  ];
  return html`<h2>Cost of synchronization</h2><p class="soft">Bytes are summed over all ranks. Staleness is the number of updates by other ranks between reading weights and applying their gradient.</p>
    <${Table} label="Cost of synchronization" jobs=${jobs} baseline=${baseline} rows=${rows} />`;
}

function inOrderBy(metrics) {
  const byKey = new Map(metrics.map((one) => [one.key, one]));
  return inOrder(byKey.keys()).map((key) => byKey.get(key));
}

// A metric as a row of cells. The best job is marked if the metric has a best value.
function rowOfMetric({ key, values, changes }) {
  const end = LESS.test(key) ? 'min' : MORE.test(key) ? 'max' : null;
  const bests = end ? values.map((one) => asNumber(one?.[end])).filter((value) => value !== null) : [];
  const best = new Set(bests).size > 1 ? Math[end](...bests) : null;
  const cells = values.map((one, n) => {
    if (!one) return { text: '–' };
    const more = end ? `best ${number(one[end])} at ${number(one[`${end}_step`])}` : `${number(one.min)} to ${number(one.max)}`;
    const change = changes[n];
    return { text: number(one.last), more, change: change ? `${change > 0 ? '+' : '-'}${number(Math.abs(change))}` : '', isBest: best !== null && one[end] === best };
  });
  return { name: key, cells };
}

function Table({ label, jobs, baseline, rows }) {
  return html`<div class="card" role="region" aria-label=${label} tabindex="0"><table class="differs"><thead><tr><td></td>${jobs.map((job, n) => html`<th key=${job.id} class=${`num colour-${n % NUM_COLOURS}`}>${nameOf(job)}${job.id === baseline ? ' (baseline)' : ''}</th>`)}</tr></thead>
    <tbody>${rows.map(({ name, cells }) => html`<tr key=${name}><td><code>${name}</code></td>${cells.map(({ text, more, change, isBest }, n) => html`<td key=${n} class=${`num ${isBest ? 'best' : ''}`}>${text}${
      change && html` <span class="soft">${change}</span>`}${more && html`<br /><small class=${isBest ? '' : 'soft'}>${more}</small>`}</td>`)}</tr>`)}</tbody></table></div>`;
}
