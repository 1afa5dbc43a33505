// Compares jobs: the answer of `/v1/compare`, and their curves in shared charts.

import { address, adjust, link } from '../lib/address.js';
import { get } from '../lib/api.js';
import { AXES, placesOn } from '../lib/axes.js';
import { DASHES, coloursOf, pointed } from '../lib/colours.js';
import { LESS, MORE } from '../lib/directions.js';
import { bytes, duration, number, plural, signed, whole as wholeNumber } from '../lib/format.js';
import { html, useEffect, useMemo, useState } from '../lib/html.js';
import { repeat } from '../lib/live.js';
import { LiveSeries, aggregate } from '../lib/series.js';
import { useStore } from '../lib/stores.js';
import { axisOfValues, brushTexts, brushesIn, isWithin } from '../lib/run_axes.js';
import { AddToReport, blockOf } from '../parts/add_to_report.js';
import { Swatch, asNumber, drawn } from '../parts/chart.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { Coordinates } from '../parts/coordinates.js';
import { useDetails } from '../parts/details.js';
import { ENDED, State, Tags, costOf, goodputOf, isArrayId, isJobId, toJob, valueText } from '../parts/job_parts.js';
import { LayoutTools, useLayout } from '../parts/layout_tools.js';
import { ChartTools, Panel, arranged, chartOptions } from '../parts/panels.js';
import { ColourPicker, Eye, namesOf } from '../parts/runs.js';
import { Scatter } from '../parts/scatter.js';
import { inOrder } from './job/curves.js';
import { ComparedMedia } from './compared_media.js';
import { SweepView } from './sweep.js';

const MOST = 20;
const EVERY_MS = 4000;
const MOST_ADDED = 4; // charts that are added to a report
const NO_GROUP = 'none';
// The axes of the lines over parameters and metrics; the plot of two values offers all.
const [MOST_FIELDS, MOST_METRICS] = [8, 3];
// What jobs can be grouped by, besides labels.
const GROUPS = { name: ({ name }) => name, experiment: ({ experiment }) => experiment, sweep: ({ array_id: id }) => id, owner: ({ owner }) => owner };

export function ComparePage() {
  const { params } = useStore(address);
  const sweep = params.get('sweep');
  return sweep && isArrayId(sweep) ? html`<${SweepView} id=${sweep} />` : html`<${Comparison} params=${params} />`;
}

// The comparison and the series of its jobs, with `times` also the times of steps, and with `documents` the
// jobs themselves. Polled while one of the jobs is live.
function useComparison(ids, times, documents) {
  const [state, setState] = useState({ found: null, series: {}, whole: {}, error: null });
  const key = ids.join();
  useEffect(() => {
    setState((was) => (was.key === key ? was : { found: null, series: {}, whole: {}, error: null }));
    if (!key) return undefined;
    const controller = new AbortController();
    const live = new Map();
    const whole = {};
    repeat(async (signal) => {
      const found = await get('v1/compare', { jobs: key }, signal);
      // The answer can also contain the baseline.
      for (const { id } of found.jobs) {
        if (!live.has(id)) live.set(id, new LiveSeries(id, { times }));
        await live.get(id).read(signal);
        // The number of steps is known once the job runs.
        if (documents && !whole[id]?.progress?.total_steps) whole[id] = await get(`v1/jobs/${id}`, {}, signal);
      }
      if (!signal.aborted) setState({ key, found, series: Object.fromEntries([...live].map(([id, one]) => [id, one.series])), whole: { ...whole }, error: null });
      return found.jobs.every((job) => ENDED.has(job.state));
    }, { every: EVERY_MS, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [key, times, documents]);
  return state;
}

function Comparison({ params }) {
  const ids = [...new Set((params.get('jobs') || '').split(',').filter(isJobId))].slice(0, MOST);
  const [experiment, setExperiment] = useState(null);
  const saved = useLayout(experiment);
  const options = chartOptions(params, saved.layout);
  const { found, series, whole, error } = useComparison(ids, Boolean(AXES[options.x].timed), Boolean(AXES[options.x].ofJob));
  const [chosen, setChosen] = useState({});
  const hidden = new Set((params.get('hide') || '').split(','));
  const jobs = (found?.jobs ?? []).map((job) => (job.id in chosen ? { ...job, colour: chosen[job.id] } : job));
  const places = useMemo(() => new Map(jobs.map(({ id }) => [id, placesOn(options.x, series[id], whole[id])])), [options.x, series, whole]);
  const closer = useDetails(places, series, options.range);
  const shared = experimentOf(found?.jobs ?? []);
  useEffect(() => { if (found) setExperiment(shared); }, [shared, Boolean(found)]);
  if (!ids.length) return html`<h1>Compare</h1><${Empty}>Choose two or more jobs in <a href="#/jobs">the list of jobs</a>.<//>`;
  if (!found || shared !== experiment || !saved.isKnown) return html`<h1>Compare</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const { baseline } = found;
  const names = namesOf(jobs);
  const colours = coloursOf(jobs);
  const runs = jobs.map((job) => ({ ...job, title: names.get(job.id), n: colours.get(job.id) }));
  const { valuesOf, fields, keys } = valuesIn(found);
  const brushes = brushesIn(params);
  const plotted = runs.map((run) => ({ ...run, values: valuesOf.get(run.id) }));
  const axes = [...fields.slice(0, MOST_FIELDS), ...keys.slice(0, MOST_METRICS)].map((name) => axisOfValues(name, plotted.map(({ values }) => values[name]))).filter(Boolean);
  const selected = plotted.filter(({ values }) => isWithin(values, axes, brushes));
  const shown = selected.filter(({ id }) => !hidden.has(id));
  const metrics = inOrder(new Set(jobs.flatMap(({ id }) => Object.keys(series[id]))));
  const group = params.get('group') ?? '';
  const missing = shown.filter(({ id }) => !places.get(id));
  const pointsOf = (id, key) => (places.get(id) && (closer[id]?.[key] ?? series[id][key])) || { steps: [], values: [] };
  const curveOf = (run, key) => {
    const { steps, values } = pointsOf(run.id, key);
    return { name: run.title, id: run.id, colour: run.n, xs: steps.map((step) => places.get(run.id)(step)), ...drawn(values) };
  };
  const curvesOf = ({ members }) => members.flatMap(({ key, name }, n) => {
    const dash = members.length > 1 ? { dash: DASHES[n % DASHES.length] } : {};
    const named = (title) => (members.length > 1 ? `${title}, ${name}` : title);
    if (group) return grouped(shown, group, (run) => curveOf(run, key)).map((curve) => ({ ...curve, ...dash, name: named(curve.name) }));
    return shown.map((run) => ({ ...curveOf(run, key), ...dash, name: named(run.title) }));
  });
  const look = JSON.stringify([options.x, group, shown.map(({ id, title, n }) => [id, title, n])]);
  const toggle = (id) => adjust({ hide: jobs.map((job) => job.id).filter((one) => (one === id ? !hidden.has(one) : hidden.has(one))).join(',') });
  const offered = Object.keys(AXES).filter((name) => AXES[name].timed || AXES[name].ofJob || jobs.some(({ id }) => placesOn(name, series[id])));
  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">Compare ${jobs.length} jobs</h1><span class="acts">${jobs.length === 2 && html`<a class="button" href=${link(['diff'], { jobs: jobs.map(({ id }) => id).join() })}>What changed, with code and packages</a>`}<${AddToReport} blocks=${() => blocksOf(shown.map(({ id }) => id), arranged(panelsOf(metrics), options), options)} /></span></header><${Failure} error=${error} />
    <div class="card"><table class="compared"><thead><tr><td></td><th>Job</th><th>State</th><th>Experiment</th><th class="num">Waited</th><th class="num">Ran</th><th class="num">Workers</th><th class="num">Goodput</th><th class="num">Cost</th><td></td></tr></thead><tbody>
      ${runs.map((job) => html`<${Run} key=${job.id} run=${job} isBaseline=${job.id === baseline} isHidden=${hidden.has(job.id)} onToggle=${() => toggle(job.id)}
        onColour=${(colour) => setChosen((was) => ({ ...was, [job.id]: colour }))} onRemove=${ids.includes(job.id) && (() => adjust({ jobs: ids.filter((id) => id !== job.id).join(',') }))} />`)}</tbody></table></div>
    <${ChartTools} options=${options} offered=${offered}><label>curves <select aria-label="Group the curves" value=${group} onChange=${(event) => adjust({ group: event.target.value })}>
      <option value="">of each job</option>${groupings(jobs, group).map((one) => html`<option key=${one} value=${one}>mean by ${one.replace(/^label:/, 'label ')}</option>`)}</select></label>
      ${experiment && html`<${LayoutTools} experiment=${experiment} saved=${saved} options=${options} />`}<//>
    ${group && html`<p class="soft">Each curve is the mean of the jobs that are shown, and the band is their minimum to maximum.</p>`}
    ${missing.length > 0 && html`<p class="note">No ${AXES[options.x].name} are known of ${missing.map(({ title }) => title).join(', ')}.</p>`}
    <div class="panels">${arranged(panelsOf(metrics), options).map((panel) => html`<${Panel} key=${panel.name} panel=${panel} options=${options} metrics=${metrics} curves=${() => curvesOf(panel)} of=${[series, places, closer, look]}
        axis=${options.x || 'step'} sync="compare" label=${`${panel.name} of ${shown.length} jobs`} />`)}</div>
    ${runs.length > 1 && axes.length > 1 && html`<h2>Parameters and metrics</h2>
      <${Coordinates} runs=${plotted} axes=${axes} brushes=${brushes} onBrush=${(name, range) => adjust({ brush: brushTexts(new Map([...brushes, [name, range]])) }, true)} label="Jobs" />
      ${brushes.size > 0 && html`<p role="status">${plural(selected.length, 'job')} of ${wholeNumber(runs.length)} selected; the charts show only these. <button onClick=${() => adjust({ brush: [] })}>Select all</button></p>`}
      <${Scatter} runs=${selected} names=${[...fields, ...keys]} params=${params} defaults=${[fields[0] ?? keys[0], keys[0] ?? fields[0]]} />`}
    <${Synchronization} jobs=${runs} baseline=${baseline} sync=${found.sync} />
    <h2>Metrics</h2><p class="soft">The newest value${baseline ? ', its difference from the baseline,' : ''} and the best value or the range, with steps.</p>
    <${Table} label="Metrics of each job" jobs=${runs} baseline=${baseline} rows=${inOrderBy(found.metrics).map(rowOfMetric)} />
    <${ComparedMedia} runs=${shown} params=${params} />
    <h2>Differences between the documents</h2>
    ${found.differences.length ? html`<${Table} label="Fields that differ" jobs=${runs} baseline=${baseline} rows=${found.differences.map(({ pointer, values }) => ({ name: pointer, cells: values.map((value) => ({ text: valueText(value) })) }))} />` : html`<p class="soft">None.</p>`}
  </section>`;
}

const panelsOf = (metrics) => metrics.map((key) => ({ name: key, members: [{ key, name: key }] }));

// The first charts and a table of the comparison, as blocks of a report.
function blocksOf(runs, panels, { x, log, smooth, kind, limits }) {
  const charts = panels.slice(0, MOST_ADDED).map(({ name, members }) => {
    const [least, most] = limits.get(name) ?? [];
    return blockOf('chart', { metrics: members.map(({ key }) => key), runs, x, scale: log ? 'log' : '', smoothing: kind ? 0 : smooth, y_min: least, y_max: most });
  });
  return [blockOf('table', { runs, columns: 'state,duration,cost' }), ...charts];
}

// A job's row, which is marked while the reader points at its curve, and marks the curve.
function Run({ run: job, isBaseline, isHidden, onToggle, onColour, onRemove }) {
  const isPointed = useStore(pointed) === job.id;
  return html`<tr class=${`${isBaseline ? 'baseline' : ''} ${isPointed ? 'pointed' : ''} ${isHidden ? 'unseen' : ''}`} onPointerEnter=${() => pointed.set(job.id)} onPointerLeave=${() => pointed.set(null)} onFocusCapture=${() => pointed.set(job.id)} onBlurCapture=${() => pointed.set(null)}>
    <td class="look"><${Eye} name=${job.title} hidden=${isHidden} onToggle=${onToggle} /><${ColourPicker} jobId=${job.id} name=${job.title} n=${job.n} onChange=${onColour} /></td>
    <td><a href=${toJob(job.id)} title=${job.id}>${job.title}</a>${isBaseline && html` <strong class="note">baseline</strong>`} <${Tags} tags=${job.tags} /></td><td><${State} job=${job} /></td>
    <td>${job.experiment ?? '–'}</td><td class="num">${duration(job.waited_s)}</td><td class="num">${duration(job.ran_s)}</td>
    <td class="num">${job.world_size}</td><td class="num">${goodputOf(job)}</td><td class="num">${costOf(job) ?? '–'}</td>
    <td class="num">${onRemove && html`<button class="quiet" aria-label=${`Leave out ${job.title}`} onClick=${onRemove}>×</button>`}</td></tr>`;
}

// The experiment to which all jobs belong; null if they don't belong to the same.
const experimentOf = (jobs) => (jobs.length && jobs.every(({ experiment }) => experiment === jobs[0].experiment) ? jobs[0].experiment : null);

// The values of each job: the fields in which the documents differ, and the last value of each metric. fields,
// keys: their names.
function valuesIn({ jobs, differences, metrics }) {
  const fields = differences.map(({ pointer, values }) => ({ name: pointer.slice(1).replaceAll('/', '.').replaceAll('~1', '/').replaceAll('~0', '~'), values }));
  const sorted = inOrderBy(metrics).filter(({ values }) => values.some((one) => typeof one?.last === 'number'));
  const evaluated = [...sorted.filter(({ key }) => LESS.test(key) || MORE.test(key)), ...sorted.filter(({ key }) => !LESS.test(key) && !MORE.test(key))];
  const valuesOf = new Map(jobs.map(({ id }, n) => [id, Object.fromEntries([
    ...fields.map(({ name, values }) => [name, values[n]]), ...evaluated.map(({ key, values }) => [key, asNumber(values[n]?.last)]),
  ])]));
  return { valuesOf, fields: fields.map(({ name }) => name), keys: evaluated.map(({ key }) => key) };
}

// What these jobs can be grouped by, including `current`, which the address names.
function groupings(jobs, current) {
  const labels = new Set(jobs.flatMap(({ labels: own }) => Object.keys(own)).map((key) => `label:${key}`));
  return [...new Set([...Object.keys(GROUPS), ...[...labels].sort(), ...(current ? [current] : [])])];
}

// The mean curve of each group of jobs, with a band from the minimum to the maximum.
function grouped(runs, by, curveOf) {
  const groupOf = Object.hasOwn(GROUPS, by) ? GROUPS[by] : ({ labels }) => labels[by.replace(/^label:/, '')];
  const groups = new Map();
  for (const run of runs) {
    const name = groupOf(run) ?? NO_GROUP;
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return [...groups].map(([name, members], n) => {
    const { xs, ys, low, high } = aggregate(members.map(curveOf));
    return { name: `${name} (${members.length})`, colour: n, xs, ys, band: members.length > 1 ? { xs, low, high } : undefined };
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
    return { text: number(one.last), more, change: change ? signed(change) : '', isBest: best !== null && one[end] === best };
  });
  return { name: key, cells };
}

function Table({ label, jobs, baseline, rows }) {
  return html`<div class="card" role="region" aria-label=${label} tabindex="0"><table class="differs"><thead><tr><td></td>${jobs.map((job) => html`<th key=${job.id} class="num"><${Swatch} n=${job.n} /> ${job.title}${job.id === baseline ? ' (baseline)' : ''}</th>`)}</tr></thead>
    <tbody>${rows.map(({ name, cells }) => html`<tr key=${name}><td><code>${name}</code></td>${cells.map(({ text, more, change, isBest }, n) => html`<td key=${n} class=${`num ${isBest ? 'best' : ''}`}>${text}${
      change && html` <span class="soft">${change}</span>`}${more && html`<br /><small class=${isBest ? '' : 'soft'}>${more}</small>`}</td>`)}</tr>`)}</tbody></table></div>`;
}
