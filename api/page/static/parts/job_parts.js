// Short displays of a job: state, progress, numbers.

import { serverNow } from '../lib/api.js';
import { leftOf, money, number, percent, whole } from '../lib/format.js';
import { html } from '../lib/html.js';
import { usePoll } from '../lib/live.js';
import { link } from '../lib/address.js';

export const STATES = ['QUEUED', 'STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING', 'SUCCEEDED', 'FAILED', 'CANCELLED'];
export const ENDED = new Set(['SUCCEEDED', 'FAILED', 'CANCELLED']);
// Whether all jobs have ended, given their counts per state.
export const isOver = (counts) => Object.keys(counts).every((state) => ENDED.has(state));
export const WITH_SLOTS = new Set(['STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING']);

export function State({ job }) {
  const held = job.held_by && job.state === 'QUEUED';
  return html`<span class=${`state state-${job.state.toLowerCase()}`} title=${job.reason?.message}>
    ${held ? 'HELD' : job.state}</span>`;
}

// An address can contain anything, and the id becomes part of the path of a call.
export const isJobId = (text) => /^job-[0-9a-z]+$/.test(text);
export const isArrayId = (text) => /^array-[0-9a-z]+$/.test(text);

export const nameOf = (job) => job.name || job.id;
export const toJob = (id, tab, more) => link(['jobs', id], { tab, ...more });

// The model of a node's GPUs, as Ray names it; empty without GPUs.
export const gpuOf = ({ resources }) => Object.keys(resources).find((name) => name.startsWith('accelerator_type:'))?.slice(17) ?? '';

// A link to a view of Ray's dashboard.
export function RayLink({ dashboard, place, title, className, children }) {
  if (!dashboard) return children;
  return html`<a class=${className} href=${`${dashboard.replace(/\/+$/, '')}/#/${place}`} title=${title} target="_blank" rel="noopener noreferrer">${children}</a>`;
}

export function JobLink({ job, style, children }) {
  return html`<a href=${toJob(job.id)} title=${job.id} style=${style}>${children ?? nameOf(job)}</a>`;
}

// What distinguishes the job from others of its array or sweep: `#3 lr 0.01, width 32`.
export const Variant = ({ job }) => job.variant && html`<span class="variant" title=${job.variant}>${job.variant}</span>`;

// Links within a text must differ from it in more than the colour.
export const IN_TEXT = { textDecoration: 'underline' };

// A sentence of the server, with the names of the jobs whose ids it contains.
export const Message = ({ text }) => text.split(/\b(job-[0-9a-z]{26})\b/).map((part, n) => (n % 2 ? html`<${NamedJob} key=${n} id=${part} style=${IN_TEXT} />` : part));

// The jobs that sentences have named, by id. Names of jobs don't change.
const named = new Map();

// A list can be empty, so a job that was deleted is no error.
export function NamedJob({ id, style }) {
  const [job] = usePoll(named.has(id) ? null : 'v1/jobs', { id_prefix: id, brief: true, limit: 1 }, 0).data?.items ?? [];
  if (job) named.set(id, job);
  return html`<${JobLink} job=${named.get(id) ?? { id }} style=${style} />`;
}

// With `isPlain`, the reason of a failure is left out.
export function Progress({ job, isPlain }) {
  const { progress } = job;
  if (job.state === 'FAILED' && !isPlain) return html`<span class="failed" title=${job.reason.message}>${job.reason.message}</span>`;
  if (!progress) {
    return html`<span class="soft">${job.state === 'QUEUED' && job.position ? `${whole(job.position)} in the queue` : '–'}</span>`;
  }
  const { step, total_steps: total } = progress;
  const left = leftOf(progress, serverNow());
  const share = total ? Math.min(1, step / total) : null;
  const [one, several] = job.spec?.federated ? ['round', 'rounds'] : ['step', 'steps'];
  const text = total ? `${whole(step)} of ${whole(total)} ${several}` : `${one} ${whole(step)}`;
  return html`<span class="progress">
    ${share !== null && html`<span class="meter" role="progressbar" aria-valuemin="0" aria-valuemax="100"
      aria-valuenow=${Math.round(100 * share)} aria-label=${text}><span style=${{ width: `${100 * share}%` }}></span></span>`}
    <span class="numeric" title=${text}>${share === null ? text : `${Math.floor(100 * share)}%`}${
      left ? html` <span class="soft">${left}</span>` : ''}</span>
  </span>`;
}

// The loss to show first.
export function lossOf(job) {
  const { summary } = job;
  const key = ['train/loss', 'loss', 'val/loss'].find((name) => name in summary);
  return key ? number(summary[key]) : '–';
}

export const goodputOf = (job) => percent(job.goodput?.useful_share);
export const costOf = (job) => (job.cost ? money(job.cost.total, job.cost.currency) : null);

export function Labels({ labels }) {
  return html`<span class="labels">${Object.entries(labels).map(([key, value]) => html`<a key=${key} class="label"
    href=${link(['jobs'], { label: `${key}=${value}` })}><span class="soft">${key}</span> ${value}</a>`)}</span>`;
}

// With `onRemove(tag)`, each tag has a button that removes it.
export function Tags({ tags, onRemove }) {
  return tags.length > 0 && html`<span class="labels">${tags.map((tag) => html`<span key=${tag} class="label tag"><a href=${link(['jobs'], { where: `"${tag}" in tags` })}>#${tag}</a>${
    onRemove && html`<button class="quiet" aria-label=${`Remove the tag ${tag}`} onClick=${() => onRemove(tag)}>×</button>`}</span>`)}</span>`;
}

// A value of a document as text.
export const valueText = (value) => (value === undefined || value === null ? '–' : typeof value === 'number' ? number(value) : typeof value === 'string' ? value : JSON.stringify(value));
