// The list of jobs, which updates itself.

import { address, adjust, link, select } from '../lib/address.js';
import { get } from '../lib/api.js';
import { plural } from '../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../lib/html.js';
import { JobList, SortedJobs } from '../lib/job_list.js';
import { repeat, useNow } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { JobLink, Labels, Tags, Variant, nameOf } from '../parts/job_parts.js';
import { useMedia, useVirtual } from '../parts/virtual.js';
import { Heading, OWN, USUAL, columnOf, requested, split } from './jobs/columns.js';
import { Filters, Search, useQueues } from './jobs/filters.js';

const EVERY_MS = 4000;
const EXPORT_PAGE = 500;
const MOST_EXPORTED = 20000;
const MOST_KNOWN = 1000;
const KINDS = [['', 'no groups'], ['sweep', 'sweep'], ['experiment', 'experiment'], ['user', 'user']];
const REM = 16;

// The API query for the parameters of an address.
function queryOf(params) {
  const text = (params.get('text') || '').trim();
  const query = { state: params.getAll('state'), queue: params.get('queue'), label: params.getAll('label'), where: params.get('where') };
  if (params.get('mine')) query.owner = '@me';
  if (/^job-[0-9a-z]*$/.test(text)) query.id_prefix = text;
  else if (/^array-[0-9a-z]*$/.test(text)) query.array = text;
  else if (text) query.text = text;
  return query;
}

// A part of the view that is loaded when it is needed.
function useLater(load, isNeeded) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    if (isNeeded && !found) load().then((component) => setFound(() => component), () => {});
  }, [isNeeded]);
  return isNeeded ? found : null;
}

export function Jobs() {
  const { params, chosen: ids } = useStore(address);
  const filter = queryOf(params);
  const names = params.get('columns') ? split(params.get('columns')) : USUAL;
  const sort = params.get('sort') ?? '';
  const group = params.get('group') ?? '';
  const query = { ...filter, sort, columns: requested(names) };
  const key = JSON.stringify(query);
  const list = useMemo(() => new (sort ? SortedJobs : JobList)(query), [key]);
  useStore(list.loaded);
  const [error, setError] = useState(null);
  const [isAll, setIsAll] = useState(false);
  const [isChoosing, setIsChoosing] = useState(false);
  const chosen = new Set(ids);
  const body = useRef(null);
  const isNarrow = useMedia('(max-width: 46rem)');
  const isUsual = names === USUAL;
  const rowHeight = isNarrow && isUsual ? 76 : 38;
  const { first, last, above, below } = useVirtual(body, list.jobs.length, rowHeight, true);
  const inView = useRef([0, 0]);
  inView.current = [first, Math.max(first, last - 1)];
  const wake = useRef(null);
  const now = useNow(5000);
  const queues = useQueues();
  const [isCompleting, setIsCompleting] = useState(false);
  const known = useKnown(list.jobs, queues, isCompleting || isChoosing);

  useEffect(() => {
    const controller = new AbortController();
    setError(null);
    setIsAll(false);
    if (group) return undefined;
    repeat(async (signal) => {
      try {
        await list.refresh(...inView.current, signal);
      } catch (raised) {
        // An expression with a syntax error is not sent again.
        if (raised.code !== 'invalid_search') throw raised;
        setError(raised);
        return true;
      }
      return false;
    }, {
      every: EVERY_MS, signal: controller.signal, onError: setError, wake,
    });
    return () => controller.abort();
  }, [list, group]);
  useEffect(() => {
    if (list.next && last >= list.jobs.length - 30) list.more().catch(setError);
  }, [list, last, list.jobs.length]);

  const choose = (next) => {
    setIsAll(false);
    select([...next]);
  };
  const toggle = (id) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    choose(next);
  };
  const columns = names.map(columnOf);
  const rows = list.jobs.slice(first, last);
  const isUnreadable = error?.code === 'invalid_search' && !/^\/(columns|sort)$/.test(error.pointer ?? '');
  const allChosen = list.jobs.length > 0 && list.jobs.every(({ id }) => chosen.has(id));
  const Groups = useLater(() => import('./jobs/groups.js').then((module) => module.Groups), Boolean(group));
  const Chosen = useLater(() => import('./jobs/bulk.js').then((module) => module.Chosen), chosen.size > 0);
  const ColumnDialog = useLater(() => import('./jobs/choose_columns.js').then((module) => module.ColumnDialog), isChoosing);
  const cells = (job) => columns.filter(({ name }) => name !== 'progress').map((column) => html`<span key=${column.name}><span class="soft">${column.title}</span> ${column.cell(job, now)}</span>`);
  const isWide = !isUsual && (isNarrow ? 10 + 8 * names.length : 20 + 7 * names.length) * REM > innerWidth;
  const found = list.jobs.filter(({ id }) => chosen.has(id));

  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">Jobs</h1>
      <span class="soft" role="status">${!group && list.loaded.value && `${plural(list.jobs.length, 'job')}${list.next ? ' so far' : ''}`}</span>
      <a class="button primary" href=${link(['submit'])}>Submit a job</a></header>
    <${Filters} params=${params} queues=${queues} />
    <${Search} where=${params.get('where') ?? ''} error=${isUnreadable ? error : null} known=${known} onFocus=${() => setIsCompleting(true)} />
    <div class="toolbar listing"><button onClick=${() => setIsChoosing(true)}>Columns</button>
      <label>group by <select value=${group} onChange=${(event) => adjust({ group: event.target.value, ...(!isNumber(sort ?? '') && { sort: '' }) })}>${[...KINDS, ...groupLabels(known.labels, group)].map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select></label>
      ${sort && html`<span class="soft">sorted by ${sort.replace(/^-/, '')}, ${sort.startsWith('-') ? 'largest' : 'smallest'} first</span><button class="quiet" onClick=${() => adjust({ sort: '' })}>Newest first</button>`}
      ${!group && list.jobs.length > 0 && html`<${Export} query=${query} names=${names} />`}</div>
    <${Failure} error=${isUnreadable ? null : error} />
    ${group && Groups && html`<${Groups} by=${group} sort=${sort} query=${filter} columns=${query.columns} row=${cells} />`}
    ${!group && !list.loaded.value && !error && html`<${Loading} />`}
    ${!group && list.loaded.value && list.jobs.length === 0 && html`<${Empty}>
      ${[...params.keys()].length ? 'No matching jobs.' : html`There are no jobs yet. <a href=${link(['submit'])}>Submit the first one</a>.`}<//>`}
    ${!group && list.jobs.length > 0 && html`<div class=${isWide ? 'sideways' : ''}><table class=${`jobs ${isUsual ? '' : 'custom'}`} style=${isWide ? { width: `${20 + 7 * names.length}rem` } : {}} aria-rowcount=${list.next ? -1 : list.jobs.length + 1}>
      <thead><tr>
        <th class="pick"><input type="checkbox" aria-label="Choose all loaded jobs" checked=${allChosen}
          onChange=${() => choose(allChosen ? [] : list.jobs.map((job) => job.id))} /></th>
        <${Heading} column=${{ name: 'name', title: 'Name', sorts: true }} sort=${sort} />${columns.map((column) => html`<${Heading} key=${column.name} column=${column} sort=${sort} />`)}
      </tr></thead>
      <tbody ref=${body}>
        ${above > 0 && html`<tr key="above" class="spacer" aria-hidden="true" style=${{ height: `${above}px` }}></tr>`}
        ${rows.map((job, index) => html`<tr key=${job.id} aria-rowindex=${first + index + 2} class=${chosen.has(job.id) ? 'chosen' : ''}>
          <td class="pick"><input type="checkbox" aria-label=${`Choose ${[nameOf(job), job.variant].filter(Boolean).join(' ')}`} checked=${chosen.has(job.id)} onChange=${() => toggle(job.id)} /></td>
          <td class="name"><${JobLink} job=${job} /> <${Variant} job=${job} /> <${Tags} tags=${job.tags} /> <${Labels} labels=${job.labels} /></td>
          ${columns.map((column) => html`<td key=${column.name} class=${column.className}>${column.cell(job, now)}</td>`)}
        </tr>`)}
        ${below > 0 && html`<tr key="below" class="spacer" aria-hidden="true" style=${{ height: `${below}px` }}></tr>`}
      </tbody></table></div>`}
    ${found.length > 0 && Chosen && html`<${Chosen} jobs=${found} matching=${isAll ? withoutEmpty(filter) : null} clear=${() => choose([])} wake=${wake}>
      ${allChosen && list.next && !isAll && html`<button onClick=${() => setIsAll(true)}>Choose all that match</button>`}<//>`}
    ${isChoosing && ColumnDialog && html`<${ColumnDialog} shown=${names} offers=${known.columns} onClose=${() => setIsChoosing(false)} />`}
  </section>`;
}

const withoutEmpty = (filter) => Object.fromEntries(Object.entries(filter).filter(([, value]) => value && value.length));

// Whether groups can be compared by the column of this order.
function isNumber(sort) {
  const name = sort.replace(/^-/, '');
  return ['cost', 'duration'].includes(name) || !(Object.hasOwn(OWN, name) || ['id', 'name'].includes(name) || name.startsWith('labels.'));
}

// The labels that the list can be grouped by, including the one of the address.
function groupLabels(labels, current) {
  const keys = labels.filter((label) => label !== 'experiment').map((label) => `label:${label}`);
  const all = current.startsWith('label:') && !keys.includes(current) ? [...keys, current] : keys;
  return all.map((value) => [value, `label ${value.slice('label:'.length)}`]);
}

// Names to complete: of metrics, labels and tags of the first jobs, of queues, and of the document's fields,
// which are loaded when `isNeeded`.
function useKnown(listed, queues, isNeeded) {
  const [fields, setFields] = useState([]);
  useEffect(() => {
    if (!isNeeded || fields.length) return undefined;
    const controller = new AbortController();
    Promise.all([get('v1/schema', {}, controller.signal), import('../lib/schema.js')]).then(([schema, { leavesOf }]) => setFields(leavesOf(schema)), () => {});
    return () => controller.abort();
  }, [isNeeded]);
  return useMemo(() => {
    const jobs = listed.slice(0, MOST_KNOWN);
    const all = (of) => [...new Set(jobs.flatMap(of))].sort();
    const metrics = all(({ summary }) => Object.keys(summary));
    const labels = all((job) => Object.keys(job.labels));
    const [tags, owners] = [all((job) => job.tags), all(({ owner }) => [owner])];
    const values = { state: ['QUEUED', 'STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING', 'SUCCEEDED', 'FAILED', 'CANCELLED'], queue: queues, owner: owners, experiment: all((job) => [job.labels.experiment].filter(Boolean)), name: all(({ name }) => [name]).slice(0, 500) };
    for (const label of labels) values[`labels.${label}`] = all((job) => [job.labels[label]].filter(Boolean));
    const isPlain = (key) => /^[\w.-]+(\/[\w.-]+)+$/.test(key);
    const names = metrics.map((key) => (isPlain(key) ? key : `metrics[${JSON.stringify(key)}]`));
    const columns = [...names, ...names.map((key) => `best:${key}`), ...labels.map((label) => (/^[A-Za-z_]\w*$/.test(label) ? `labels.${label}` : `labels[${JSON.stringify(label)}]`)), ...fields];
    return { metrics, labels, fields, tags, values, columns };
  }, [listed, queues.join(), fields]);
}

// Saves the jobs of the list as CSV, including the jobs that are not loaded yet.
function Export({ query, names }) {
  const [state, setState] = useState(null);
  const write = async () => {
    const [{ csvOf, save }, api] = await Promise.all([import('../lib/save.js'), names.filter((name) => name !== 'progress' && name !== 'loss' && name !== 'goodput')]);
    // A parameter can have the name of one of the first columns.
    const rows = [[...['id', 'name', 'variant'].map((one) => (api.includes(one) ? `job ${one}` : one)), ...api]];
    setState({ count: 0 });
    try {
      const known = new Set();
      for (let cursor = null; rows.length <= MOST_EXPORTED;) {
        const page = await get('v1/jobs', { ...query, columns: api.join(','), brief: true, limit: EXPORT_PAGE, cursor });
        for (const job of page.items) if (!known.has(job.id) && known.add(job.id)) rows.push([job.id, job.name, job.variant, ...api.map((name) => plain(job.values?.[name] ?? job[name]))]);
        setState({ count: rows.length - 1 });
        cursor = page.next_cursor;
        if (!cursor) break;
      }
      save('jobs.csv', csvOf(rows));
      setState(rows.length > MOST_EXPORTED ? { note: `the first ${MOST_EXPORTED} jobs were saved` } : null);
    } catch (error) {
      setState({ error });
    }
  };
  return html`<button disabled=${state?.count !== undefined} onClick=${write}>Save as CSV</button>${state?.count !== undefined && html`<span class="soft" role="status">${plural(state.count, 'job')} read …</span>`}
    ${state?.note && html`<span class="note">${state.note}</span>`}<${Failure} error=${state?.error} />`;
}

const plain = (value) => (value !== null && typeof value === 'object' ? JSON.stringify(value) : value);
