// Jobs beside each other: curves in one picture, fields that differ, last values.

import { address, adjust } from '../lib/address.js';
import { get } from '../lib/api.js';
import { duration, number, seconds } from '../lib/format.js';
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { repeat } from '../lib/live.js';
import { LiveSeries } from '../lib/series.js';
import { useStore } from '../lib/stores.js';
import { Chart, NUM_COLOURS, asNumber } from '../parts/chart.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { ENDED, State, costOf, goodputOf, isJobId, nameOf, toJob } from '../parts/job_parts.js';
import { inOrder } from './job/curves.js';

const MOST = 20;

// The jobs and their series, asked for anew while a job is live.
function useJobs(ids) {
  const [state, setState] = useState({ jobs: null, series: [], error: null });
  const live = useRef([]);
  const key = ids.join();
  useEffect(() => {
    const controller = new AbortController();
    live.current = ids.map((id) => new LiveSeries(id));
    setState({ jobs: null, series: [], error: null });
    repeat(async (signal) => {
      const jobs = await Promise.all(ids.map((id) => get(`v1/jobs/${id}`, {}, signal)));
      for (const one of live.current) await one.read(signal);
      if (!signal.aborted) setState({ jobs, series: live.current.map((one) => one.series), error: null });
      return jobs.every((job) => ENDED.has(job.state));
    }, { every: 4000, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [key]);
  return state;
}

// {'train.optimizer.lr': 0.001} of a document.
function flat(value, path = '', found = {}) {
  if (value && typeof value === 'object' && !Array.isArray(value)) for (const [name, inner] of Object.entries(value)) flat(inner, path ? `${path}.${name}` : name, found);
  else found[path] = value;
  return found;
}

const LESS = /loss|time|error|perplexity/;

export function ComparePage() {
  const { params } = useStore(address);
  const ids = [...new Set((params.get('jobs') || '').split(',').filter(isJobId))].slice(0, MOST);
  const { jobs, series, error } = useJobs(ids);
  const [range, setRange] = useState(null);
  const log = params.get('log') === '1';
  const smooth = Number(params.get('smooth')) || 0;
  if (ids.length < 2) return html`<${Empty}>Choose two jobs or more in <a href="#/jobs">the list of jobs</a>.<//>`;
  if (!jobs) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const keys = inOrder(new Set(series.flatMap((one) => Object.keys(one))));
  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">Compare ${jobs.length} jobs</h1></header><${Failure} error=${error} />
    <div class="card"><table><thead><tr><th>Job</th><th>State</th><th class="num">Step</th><th class="num">Took</th><th class="num">Workers</th><th class="num">Goodput</th><th class="num">Cost</th><td></td></tr></thead><tbody>
      ${jobs.map((job, n) => html`<tr key=${job.id}><td><span class=${`keys colour-${n % NUM_COLOURS}`}><span><span class="swatch"></span><a href=${toJob(job.id)} title=${job.id}>${nameOf(job)}</a></span></span></td><td><${State} job=${job} /></td>
        <td class="num">${number(job.progress?.step)}</td><td class="num">${job.started_at ? duration(seconds(job.started_at, job.finished_at ?? new Date())) : '–'}</td>
        <td class="num">${job.world_size}</td><td class="num">${goodputOf(job)}</td><td class="num">${costOf(job) ?? '–'}</td>
        <td class="num"><button class="quiet" aria-label=${`Leave out ${nameOf(job)}`} onClick=${() => adjust({ jobs: ids.filter((id) => id !== job.id).join(',') })}>×</button></td></tr>`)}</tbody></table></div>
    <div class="toolbar"><label><input type="checkbox" checked=${log} onChange=${(event) => adjust({ log: event.target.checked ? '1' : '' })} /> log scale</label>
      <label>smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smooth} onInput=${(event) => adjust({ smooth: Number(event.target.value) || '' })} /></label>
      ${range && html`<button onClick=${() => setRange(null)}>Show all</button>`}</div>
    <div class="panels">${keys.map((key) => html`<section key=${key} class="panel" aria-label=${key}><h2 class="minor">${key}</h2>
      <${Chart} curves=${jobs.map((job, n) => ({ name: nameOf(job), xs: series[n][key]?.steps ?? [], ys: (series[n][key]?.values ?? []).map(asNumber) }))}
        log=${log} smooth=${smooth} range=${range} onZoom=${setRange} sync="compare" label=${`${key} of ${jobs.length} jobs`} /></section>`)}</div>
    <h2>Last values</h2><${Table} jobs=${jobs} rows=${inOrder(new Set(jobs.flatMap((job) => Object.keys(job.summary)))).map((key) => ({ name: key, values: jobs.map((job) => job.summary[key]), less: LESS.test(key) }))} ranked=${true} />
    <h2>What differs in the documents</h2><${Differences} jobs=${jobs} /></section>`;
}

function Differences({ jobs }) {
  const documents = jobs.map((job) => flat(job.spec));
  const names = [...new Set(documents.flatMap((one) => Object.keys(one)))].sort();
  const rows = names.map((name) => ({ name, values: documents.map((one) => one[name]) })).filter(({ values }) => new Set(values.map((value) => JSON.stringify(value))).size > 1);
  return rows.length ? html`<${Table} jobs=${jobs} rows=${rows} />` : html`<p class="soft">Nothing.</p>`;
}

const said = (value) => (value === undefined || value === null ? '–' : typeof value === 'number' ? number(value) : typeof value === 'string' ? value : JSON.stringify(value));

function Table({ jobs, rows, ranked = false }) {
  const best = ({ values, less }) => {
    const numbers = values.filter((value) => typeof value === 'number');
    return ranked && numbers.length > 1 ? (less ? Math.min(...numbers) : Math.max(...numbers)) : null;
  };
  return html`<div class="card"><table class="differs"><thead><tr><td></td>${jobs.map((job, n) => html`<th key=${job.id} class=${`num colour-${n % NUM_COLOURS}`}>${nameOf(job)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.name}><td><code>${row.name}</code></td>${row.values.map((value, n) => html`<td key=${n} class=${`num ${value === best(row) && /^val/.test(row.name) ? 'best' : ''}`}>${said(value)}</td>`)}</tr>`)}</tbody></table></div>`;
}
