// The columns of the list of jobs. A column is one of the page's own, or one that the API knows: a metric, a
// parameter, a label.

import { adjust } from '../../lib/address.js';
import { ago, clock, duration, exactly, number, seconds, signed } from '../../lib/format.js';
import { html } from '../../lib/html.js';
import { Progress, State, Tags, costOf, goodputOf, lossOf, valueText } from '../../parts/job_parts.js';

const since = (job, now) => (job.started_at ? seconds(job.started_at, job.finished_at ?? now) : null);
const time = (value, now) => html`<span title=${exactly(value)}>${value ? ago(value, now) : '–'}</span>`;

// Each column: its title, its cell, its class, and whether the API sorts by it. Columns without `own` are
// requested from the API when the reader chooses them.
export const OWN = {
  state: { title: 'State', cell: (job) => html`<${State} job=${job} />`, className: 'is', sorts: true },
  progress: { title: 'Progress', cell: (job) => html`<${Progress} job=${job} />`, className: 'wide' },
  loss: { title: 'Loss', cell: lossOf, className: 'num loss' },
  queue: { title: 'Queue', cell: ({ queue }) => queue, className: 'queue', sorts: true },
  owner: { title: 'Owner', cell: ({ owner }) => owner, className: 'who', sorts: true },
  world_size: { title: 'Workers', cell: (job) => job.world_size, className: 'num size', hint: 'The world size' },
  goodput: { title: 'Goodput', cell: goodputOf, className: 'num good', hint: "The share of its slots' time that was useful" },
  cost: { title: 'Cost', cell: (job) => costOf(job) ?? '–', className: 'num cost', sorts: true },
  created_at: { title: 'Submitted', cell: (job, now) => time(job.created_at, now), className: 'num when', sorts: true },
  started_at: { title: 'Started', cell: (job, now) => time(job.started_at, now), className: 'num', sorts: true },
  finished_at: { title: 'Ended', cell: (job, now) => time(job.finished_at, now), className: 'num', sorts: true },
  duration: { title: 'Duration', cell: (job, now) => duration(since(job, now)), className: 'num', sorts: true, hint: 'From the first start to the end. Jobs that have not ended are sorted last' },
  priority: { title: 'Priority', cell: ({ priority }) => priority, className: 'num' },
  project: { title: 'Project', cell: ({ project }) => project, className: '', sorts: true },
  experiment: { title: 'Experiment', cell: ({ labels }) => labels.experiment ?? '–', className: '', sorts: true },
  tags: { title: 'Tags', cell: ({ tags }) => html`<${Tags} tags=${tags} />`, className: '' },
  attempt: { title: 'Attempts', cell: ({ attempt }) => attempt, className: 'num' },
};
// Columns that the API does not have.
export const ONLY_HERE = ['loss'];
export const USUAL = ['state', 'progress', 'loss', 'queue', 'owner', 'world_size', 'goodput', 'cost', 'created_at'];

// A list of columns is separated by commas, except for commas in quotes.
export function split(text) {
  return (text || '').match(/(?:"(?:\\.|[^"\\])*"|[^,"])+/g)?.map((one) => one.trim()).filter(Boolean) ?? [];
}

// A column by its name in the address. Its cell gets the job, the current time, and the baseline if there is one.
export function columnOf(name) {
  if (Object.hasOwn(OWN, name)) return { name, ...OWN[name] };
  const isMetric = /^(last|best|min|max):|^metrics[.[]/.test(name) || /^[^[]*\//.test(name);
  return { name, title: name.replace(/^last:/, ''), cell: (job, now, baseline) => (isMetric ? metricCell(name, job, now, baseline) : valueCell(job.values?.[name], null, now)), className: 'num value', sorts: true };
}

// A value of the API. asOf: the time of a value that can lag behind, else null.
function valueCell(value, asOf, now) {
  if (value === null || value === undefined) return '–';
  const isTime = typeof value === 'string' && /^\d{4}-\d\d-\d\dT[\d:.]+Z$/.test(value);
  const shown = isTime ? clock(value) : typeof value === 'number' ? number(value) : valueText(value);
  const exact = isTime ? exactly(value) : typeof value === 'object' ? JSON.stringify(value) : String(value);
  return html`<span title=${asOf ? `${exact}, as of ${ago(asOf, now)}` : exact}>${shown}${asOf && html`<span class="soft" aria-label="may have changed since"> ~</span>`}</span>`;
}

// A metric, with its difference from the baseline.
function metricCell(name, { id, values, values_as_of: asOf }, now, baseline) {
  const [value, base] = [values?.[name], baseline && baseline.id !== id ? baseline.values?.[name] : null];
  const change = typeof value === 'number' && typeof base === 'number' ? value - base : null;
  return html`${valueCell(value, asOf, now)}${change !== null && html` <span class="change" title=${`${number(base)} is the value of the baseline${baseline.values_as_of ? `, as of ${ago(baseline.values_as_of, now)}` : ''}`}>${signed(change)}${baseline.values_as_of && !asOf && ' ~'}</span>`}`;
}

// The columns that are requested from the API.
export const requested = (names) => names.filter((name) => !Object.hasOwn(OWN, name)).join(',');

// A heading. A click sorts by the column: the largest first, then the smallest first, then the newest jobs first.
export function Heading({ column: { name, title, className, hint, sorts }, sort }) {
  const order = sort === name ? 'ascending' : sort === `-${name}` ? 'descending' : undefined;
  const next = { descending: name, ascending: '' }[order] ?? `-${name}`;
  return html`<th class=${className} title=${hint ?? (title === name ? name : undefined)} aria-sort=${order}>${sorts
    ? html`<button class="sort" onClick=${() => adjust({ sort: next })}><span aria-hidden="true">${{ ascending: '↑ ', descending: '↓ ' }[order] ?? ''}</span>${title}</button>`
    : title}</th>`;
}
