// The list of jobs by groups: for each the number of jobs, and the best value and the spread of the column that
// the list is sorted by.

import { adjust, link } from '../../lib/address.js';
import { get } from '../../lib/api.js';
import { clock, number, plural, whole } from '../../lib/format.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { repeat } from '../../lib/live.js';
import { Empty, Failure, Loading } from '../../parts/common.js';
import { JobLink, Variant, toJob } from '../../parts/job_parts.js';
import { PinMarks, usePins } from './pins.js';

const EVERY_MS = 10000;
const PAGE = 100;
const INNER = 20;
const NO_PARAMS = new URLSearchParams();

// The part of the list's query that selects the jobs of a group; null for jobs without a group.
function filterOf(by, key) {
  if (key === null) return null;
  if (by === 'sweep') return { array: key };
  if (by === 'user') return { owner: key };
  return { label: `${by === 'experiment' ? 'experiment' : by.slice('label:'.length)}=${key}` };
}

const joined = (query, more) => ({ ...query, ...more, ...(more.label && { label: [...(query.label ?? []), more.label] }) });

export function Groups({ by, sort, query, columns, row }) {
  const [state, setState] = useState({ items: null, next: null, error: null });
  const [count, setCount] = useState(1);
  const key = JSON.stringify([by, sort, query]);
  useEffect(() => setCount(1), [key]);
  useEffect(() => {
    const controller = new AbortController();
    repeat(async (signal) => {
      const items = [];
      let cursor = null;
      for (let n = 0; n < count && (n === 0 || cursor); n += 1) {
        const page = await get('v1/job-groups', { ...query, by, sort, limit: PAGE, cursor }, signal);
        items.push(...page.items);
        cursor = page.next_cursor;
      }
      if (!signal.aborted) setState({ key, items, next: cursor, error: null });
      return false;
    }, { every: EVERY_MS, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [key, count]);
  const { items, next, error } = state;
  if (!items || state.key !== key) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const name = (sort ?? '').replace(/^-/, '');
  return html`<${Failure} error=${error} />${items.length === 0 && html`<${Empty}>No matching jobs.<//>`}
    ${items.length > 0 && html`<div class="card"><table class="groups"><thead><tr><th>Group</th><th class="num">Jobs</th>${name && html`<th class="num">Best ${name.replace(/^best:/, '')}</th><th class="num">Mean</th><th class="num">Spread</th><th class="num">Minimum to maximum</th>`}</tr></thead>
      <tbody>${items.map((group) => html`<${Group} key=${group.key} group=${group} by=${by} query=${query} sort=${sort} isSorted=${Boolean(name)} columns=${columns} row=${row} />`)}</tbody></table></div>`}
    ${next && html`<p class="buttons"><button onClick=${() => setCount(count + 1)}>Show more groups</button></p>`}
    ${!name && html`<p class="soft">Sort by a column to see the best job and the spread of each group.</p>`}`;
}

// The name of a group. A sweep has the name of its jobs.
const nameOf = (by, { name, key }) => name ?? key ?? { sweep: 'without a sweep', experiment: 'without an experiment' }[by] ?? 'without this label';

function Group({ group, by, query, sort, isSorted, columns, row }) {
  const { key, num_jobs: count, num_values: known, best, best_job: bestJob, mean, std, min, max, as_of: asOf } = group;
  const lag = asOf && html`<span class="soft" title=${`as of ${clock(asOf)}`} aria-label="may have changed since"> ~</span>`;
  const [isOpen, setIsOpen] = useState(false);
  const [jobs, setJobs] = useState(null);
  const [error, setError] = useState(null);
  const filter = filterOf(by, key);
  const name = nameOf(by, group);
  const isExperiment = by === 'experiment' && isOpen && key !== null;
  const pins = usePins(isExperiment ? key : null, NO_PARAMS, columns, isExperiment);
  const onTop = new Set(pins.jobs.map(({ id }) => id));
  useEffect(() => {
    if (!isOpen || !filter) return undefined;
    const controller = new AbortController();
    get('v1/jobs', { ...joined(query, filter), columns, sort, brief: true, limit: INNER }, controller.signal).then(({ items }) => setJobs(items), (raised) => { if (!controller.signal.aborted) setError(raised); });
    return () => controller.abort();
  }, [isOpen, JSON.stringify(filter), sort]);
  const only = () => adjust({ group: '', ...(filter.array && { text: filter.array }), ...(filter.label && { label: [...(query.label ?? []), filter.label] }), ...(filter.owner && { where: `${query.where ? `(${query.where}) and ` : ''}owner = ${JSON.stringify(filter.owner)}` }) });
  return html`<tr><td>${filter ? html`<button class="quiet" aria-expanded=${isOpen} onClick=${() => setIsOpen(!isOpen)}><span aria-hidden="true">${isOpen ? '▾' : '▸'}</span> ${name}</button>` : html`<span class="soft">${name}</span>`}
      ${by === 'sweep' && key && html` <a href=${link(['compare'], { sweep: key })}>the sweep</a>`}</td>
    <td class="num">${whole(count)}</td>${isSorted && html`<td class="num">${bestJob ? html`<a href=${toJob(bestJob)}>${number(best)}</a>` : number(best)}${lag}</td><td class="num">${number(mean)}</td><td class="num" title="Standard deviation">${known > 1 ? `± ${number(std)}` : '–'}</td><td class="num">${known ? `${number(min)} to ${number(max)}` : '–'}</td>`}</tr>
    ${isOpen && html`<tr class="inner"><td colspan=${isSorted ? 6 : 2}><${Failure} error=${error ?? pins.error} />${jobs ? html`<ul>${[...pins.jobs, ...jobs.filter(({ id }) => !onTop.has(id))].map((job) => html`<li key=${job.id}><${JobLink} job=${job} /> <${Variant} job=${job} /> ${onTop.has(job.id) && html`<${PinMarks} job=${job} pins=${pins} />`} ${row(job, pins.baselineJob)}</li>`)}</ul>
      ${count > 1 && html`<button onClick=${only}>Show only ${count > INNER ? `these ${plural(count, 'job')}` : 'these jobs'}</button>`}` : !error && html`<${Loading} />`}</td></tr>`}`;
}
