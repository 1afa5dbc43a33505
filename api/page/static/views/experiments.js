// Experiments: the list, and an experiment with its notes, its best runs and its costs.

import { address, adjust, link } from '../lib/address.js';
import { get } from '../lib/api.js';
import { LESS } from '../lib/directions.js';
import { changeExperiment, experimentPath, hasPage } from '../lib/experiments.js';
import { clock, duration, exactly, money, number, plural, seconds, whole } from '../lib/format.js';
import { html, useEffect, useState } from '../lib/html.js';
import { repeat, useNow, usePoll } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { Empty, Fact, Failure, Loading } from '../parts/common.js';
import { JobLink, State, Tags, Variant, costOf, isOver, nameOf, toJob, valueText } from '../parts/job_parts.js';
import { Notes } from '../parts/notes.js';

const EVERY_MS = 10000;
const PAGE = 100;
const MOST_GROUPS = 500;
// How many runs the leaderboard has, and how many columns with parameters.
const MOST_RUNS = 20;
const MOST_PARAMETERS = 8;
const MOST_NOTES = '65536';
// Links within a text must differ from it in more than the colour.
const IN_TEXT = { textDecoration: 'underline' };

const statesOf = (states) => Object.entries(states).map(([state, count]) => `${whole(count)} ${state}`).join(', ');
// A metric as a column of the API.
const columnOf = (key) => (/^[\w.-]+(\/[\w.-]+)+$/.test(key) ? key : `metrics[${JSON.stringify(key)}]`);
// The order in which the best runs come first, and the column with their values.
const orderOf = (key, isLess) => (isLess ? { sort: `min:${columnOf(key)}`, column: `min:${columnOf(key)}` } : { sort: `-max:${columnOf(key)}`, column: `max:${columnOf(key)}` });

export function ExperimentsPage({ path }) {
  return path[1] ? html`<${Experiment} key=${path[1]} name=${path[1]} />` : html`<${List} />`;
}

// The best value of each experiment, by its name, without the jobs that failed.
function useBest(metric, isLess) {
  const [state, setState] = useState({ found: new Map(), error: null });
  useEffect(() => {
    if (!metric) {
      setState({ found: new Map(), error: null });
      return undefined;
    }
    const controller = new AbortController();
    get('v1/job-groups', { by: 'experiment', sort: orderOf(metric, isLess).sort, where: 'state != "FAILED"', limit: MOST_GROUPS }, controller.signal).then(
      ({ items }) => setState({ found: new Map(items.map((group) => [group.key, group])), error: null }),
      (error) => { if (!controller.signal.aborted) setState({ found: new Map(), error }); },
    );
    return () => controller.abort();
  }, [metric, isLess]);
  return state;
}

function List() {
  const { params } = useStore(address);
  const metric = params.get('metric') ?? '';
  const isLess = params.has('lower') ? params.get('lower') === '1' : LESS.test(metric);
  const { data, error } = usePoll('v1/experiments', { limit: PAGE }, EVERY_MS);
  const [rest, setRest] = useState({ items: [], cursor: null });
  const [typed, setTyped] = useState(metric);
  const best = useBest(metric, isLess);
  useEffect(() => setTyped(metric), [metric]);
  const cursor = rest.cursor ?? data?.next_cursor;
  const more = () => get('v1/experiments', { limit: PAGE, cursor }).then((page) => setRest({ items: [...rest.items, ...page.items], cursor: page.next_cursor ?? '' }), () => {});
  const choose = (event) => {
    event.preventDefault();
    adjust({ metric: typed.trim(), lower: '' });
  };
  if (!data) return html`<h1>Experiments</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const items = [...data.items, ...rest.items];
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">Experiments</h1></header><${Failure} error=${error ?? best.error} />
    ${items.length === 0 ? html`<${Empty}>There are no experiments. Jobs with the same value of the label <code>experiment</code> form an experiment.<//>` : html`
    <form class="toolbar" onSubmit=${choose}><label>best of the metric <input value=${typed} placeholder="val/accuracy" spellcheck="false" autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /></label><button>Show</button>
      ${metric && html`<${Direction} isLess=${isLess} />`}</form>
    <div class="card"><table><thead><tr><th>Experiment</th><th class="num">Jobs</th><th>States</th><th>Newest job</th><th>Submitted</th>${metric && html`<th class="num">Best ${metric}</th>`}</tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.name}><td class="named">${hasPage(one.name) ? html`<a href=${link(['experiments', one.name], { metric, lower: params.get('lower') })}>${one.name}</a>` : one.name || '(no name)'}</td>
        <td class="num">${whole(one.num_jobs)}</td><td>${statesOf(one.states)}</td><td class="named"><${JobLink} job=${{ id: one.newest_job, name: one.newest_name }} /></td><td class="kept" title=${exactly(one.newest_at)}>${clock(one.newest_at)}</td>
        ${metric && html`<td class="num"><${BestOf} group=${best.found.get(one.name)} /></td>`}</tr>`)}</tbody></table>
      ${cursor && html`<p><button onClick=${more}>Show more</button></p>`}</div>`}</section>`;
}

const BestOf = ({ group }) => (group?.best_job ? html`<a href=${toJob(group.best_job)}>${number(group.best)}</a>` : '–');

function Direction({ isLess }) {
  return html`<label>better if <select aria-label="Better if" value=${isLess ? '1' : '0'} onChange=${(event) => adjust({ lower: event.target.value })}><option value="1">lower</option><option value="0">higher</option></select></label>`;
}

// The best runs by a metric, with the pinned jobs first; the comparison of their documents; and the total cost.
function useRuns(name, metric, isLess, pinned) {
  const [state, setState] = useState({ runs: null, compared: null, cost: null, error: null });
  const key = JSON.stringify([name, metric, isLess]);
  useEffect(() => {
    const controller = new AbortController();
    const label = `experiment=${name}`;
    const order = metric ? orderOf(metric, isLess) : {};
    repeat(async (signal) => {
      const query = { label, columns: order.column, brief: true };
      const [page, kept, costs] = await Promise.all([
        get('v1/jobs', { ...query, sort: order.sort, limit: MOST_RUNS }, signal),
        pinned.length ? get('v1/jobs', { ...query, where: `id in (${pinned.map((id) => `"${id}"`).join()})`, limit: pinned.length }, signal) : { items: [] },
        get('v1/job-groups', { label, by: 'experiment', sort: 'cost', limit: 1 }, signal),
      ]);
      const first = pinned.map((id) => kept.items.find((job) => job.id === id)).filter(Boolean);
      const runs = [...first, ...page.items.filter(({ id }) => !pinned.includes(id))];
      const ids = runs.map(({ id }) => id);
      const compared = ids.length > 1 ? await get('v1/compare', { jobs: ids.join() }, signal) : null;
      const [group] = costs.items;
      const cost = group?.num_values ? group.mean * group.num_values : null;
      if (!signal.aborted) setState({ key, runs, ranked: page.items, compared, cost, column: order.column, error: null });
      return false;
    }, { every: EVERY_MS, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [key, pinned.join()]);
  return state.key === key ? state : { ...state, runs: null };
}

// The metric to show first.
function usualMetric(metrics) {
  const keys = metrics.map(({ key }) => key);
  return keys.find((key) => key.startsWith('val/') && !LESS.test(key)) ?? keys.find((key) => key.startsWith('val/')) ?? keys[0] ?? '';
}

function Experiment({ name }) {
  const { params } = useStore(address);
  const { data, error, refresh } = usePoll(experimentPath(name), {}, EVERY_MS);
  const [changed, setChanged] = useState(null);
  const [failed, setFailed] = useState(null);
  const found = changed && data && changed.revision > data.revision ? { ...data, ...changed } : data;
  const metric = params.get('metric') || (found ? usualMetric(found.metrics) : '');
  const isLess = params.has('lower') ? params.get('lower') === '1' : LESS.test(metric);
  useEffect(() => { document.title = `${name} - dray`; }, [name]);
  // `fieldsOf` as in lib/experiments.js. Returns whether the change was stored.
  const store = async (fieldsOf) => {
    try {
      setChanged(await changeExperiment(name, fieldsOf, found));
      setFailed(null);
      return true;
    } catch (raised) {
      setFailed(raised);
      refresh();
      return false;
    }
  };
  const saveNotes = (notes) => store((newest, refusal) => {
    if (refusal && newest.notes !== found.notes) throw refusal;
    return { notes };
  });
  if (!found) return html`<header class="head"><h1>${name}</h1><a class="button" href=${link(['experiments'])}>All experiments</a></header>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">${name}</h1><span class="soft">${plural(found.num_jobs, 'job')}${isOver(found.states) ? '' : ', not all have ended'}</span>
      <span class="buttons"><a class="button" href=${link(['experiments'])}>All experiments</a><a class="button" href=${link(['jobs'], { label: `experiment=${name}` })}>All jobs in the list</a></span></header>
    <${Failure} error=${failed ?? error} />
    <section class="card annotations" aria-label="Notes of the experiment"><h2 class="minor">Notes</h2><${Notes} found=${found} most=${MOST_NOTES} onAnswer=${() => setFailed(null)} save=${saveNotes} /></section>
    ${found.metrics.length > 0 && html`<div class="toolbar"><label>metric <select aria-label="Metric" value=${metric} onChange=${(event) => adjust({ metric: event.target.value, lower: '' })}>
      ${[...new Set([...found.metrics.map(({ key }) => key), metric])].map((key) => html`<option key=${key} value=${key}>${key}</option>`)}</select></label><${Direction} isLess=${isLess} /></div>`}
    <${Leaderboard} name=${name} found=${found} metric=${metric} isLess=${isLess} store=${store} shown=${failed ?? error} /></section>`;
}

// The last part of a pointer; the last two parts if another pointer ends with the same part.
function titlesOf(pointers) {
  const last = (pointer, n) => pointer.split('/').slice(-n).join('.').replaceAll('~1', '/').replaceAll('~0', '~');
  return pointers.map((pointer) => (pointers.filter((other) => last(other, 1) === last(pointer, 1)).length > 1 ? last(pointer, 2) : last(pointer, 1)));
}

// shown: an error that the page shows already.
function Leaderboard({ name, found, metric, isLess, store, shown }) {
  const { runs, ranked, compared, cost, column, error: raised } = useRuns(name, metric, isLess, found.pinned);
  const error = raised?.message === shown?.message ? null : raised;
  const now = useNow(5000);
  if (!runs) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const best = metric ? ranked.find((job) => job.state !== 'FAILED' && typeof job.values?.[column] === 'number') : null;
  const pointers = (compared?.differences ?? []).map(({ pointer }) => pointer).filter((pointer) => !pointer.startsWith('/origin')).slice(0, MOST_PARAMETERS);
  const titles = titlesOf(pointers);
  const at = new Map((compared?.jobs ?? []).map(({ id }, n) => [id, n]));
  const valueOf = (id, pointer) => compared.differences.find((one) => one.pointer === pointer).values[at.get(id)];
  const jobOf = (id) => runs.find((job) => job.id === id) ?? compared?.jobs.find((job) => job.id === id) ?? { id };
  const currency = runs.find((job) => job.cost)?.cost.currency;
  const numFields = compared?.differences.length ?? 0;
  const toDiff = (id) => link(['diff'], { jobs: `${found.baseline ?? best?.id},${id}` });
  const other = found.baseline ?? best?.id;
  const toggle = (id) => store(({ pinned }) => ({ pinned: found.pinned.includes(id) ? pinned.filter((one) => one !== id) : [...new Set([...pinned, id])] }));
  return html`<${Failure} error=${error} />
    <dl class="facts card"><${Fact} name="States">${statesOf(found.states)}<//>
      ${metric && html`<${Fact} name=${`Best ${metric}`}>${best ? html`<strong>${number(best.values[column])}</strong> of <${JobLink} job=${best} /> <${Variant} job=${best} />` : '–'}<//>`}
      <${Fact} name="Baseline">${found.baseline ? html`<${JobLink} job=${jobOf(found.baseline)} /> <button class="quiet" aria-label="Remove the baseline" onClick=${() => store(() => ({ baseline: null }))}>×</button>` : 'none'}<//>
      ${cost !== null && currency && html`<${Fact} name="Cost of all jobs">${money(cost, currency)}<//>`}</dl>
    <div class="buttons">${best && html`<a class="button primary" href=${link(['submit'], { from: best.id })}>Edit and resubmit the best</a>`}
      ${runs.length > 1 && html`<a class="button" href=${link(['compare'], { jobs: runs.slice(0, MOST_RUNS).map(({ id }) => id).join() })}>Compare the curves</a>`}
      ${best && found.baseline && best.id !== found.baseline && html`<a class="button" href=${toDiff(best.id)}>What changed since the baseline</a>`}</div>
    <h2>${metric ? `The best runs by ${metric}` : 'The newest runs'}</h2>
    <div class="card"><table class="leaders"><thead><tr>${metric && html`<th class="num">#</th>`}<th>Job</th><th>State</th>${metric && html`<th class="num">${isLess ? 'Lowest' : 'Highest'}</th>`}${pointers.map((pointer, n) => html`<th key=${pointer} class="num" title=${pointer}>${titles[n]}</th>`)}<th class="num">Cost</th><th class="num">Ran</th><td></td></tr></thead>
      <tbody>${runs.map((job) => html`<tr key=${job.id} class=${job.id === found.baseline ? 'baseline' : ''}>${metric && html`<td class="num">${rankOf(ranked, job, column)}</td>`}
        <td class="named"><${JobLink} job=${job} /> <${Variant} job=${job} />${found.pinned.includes(job.id) && html` <span class="label">pinned</span>`}${job.id === found.baseline && html` <strong class="note">baseline</strong>`} <${Tags} tags=${job.tags} /></td><td><${State} job=${job} /></td>
        ${metric && html`<td class="num">${number(job.values?.[column])}</td>`}${pointers.map((pointer) => html`<td key=${pointer} class="num">${valueText(valueOf(job.id, pointer))}</td>`)}
        <td class="num">${costOf(job) ?? '–'}</td><td class="num">${job.started_at ? duration(seconds(job.started_at, job.finished_at ?? now)) : '–'}</td>
        <td class="num"><span class="acts">${other && other !== job.id && html`<a href=${toDiff(job.id)} style=${IN_TEXT} aria-label=${`What changed from the ${found.baseline ? 'baseline' : 'best'} to ${nameOf(job)}`}>changes</a>`}
          <button class="quiet" aria-pressed=${found.pinned.includes(job.id)} aria-label=${`Pin ${nameOf(job)}`} onClick=${() => toggle(job.id)}>${found.pinned.includes(job.id) ? 'unpin' : 'pin'}</button>
          ${job.id !== found.baseline && html`<button class="quiet" aria-label=${`Make ${nameOf(job)} the baseline`} onClick=${() => store(() => ({ baseline: job.id }))}>baseline</button>`}</span></td></tr>`)}</tbody></table></div>
    ${numFields > pointers.length && html`<p class="soft">${plural(numFields - pointers.length, 'further field')} of the documents differ; <a href=${link(['compare'], { jobs: runs.slice(0, MOST_RUNS).map(({ id }) => id).join() })}>Compare</a> shows all.</p>`}`;
}

// The place of a job among all jobs with a value; a dash for a pinned job that is not among the best.
function rankOf(ranked, job, column) {
  const n = ranked.findIndex(({ id }) => id === job.id);
  return n >= 0 && typeof job.values?.[column] === 'number' ? n + 1 : '–';
}
