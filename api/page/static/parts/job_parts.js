// How a job is shown in a few words: its state, its progress, its numbers.

import { duration, money, number, percent, whole } from '../lib/format.js';
import { html } from '../lib/html.js';
import { link } from '../lib/address.js';

export const STATES = ['QUEUED', 'STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING', 'SUCCEEDED', 'FAILED', 'CANCELLED'];
export const ENDED = new Set(['SUCCEEDED', 'FAILED', 'CANCELLED']);
export const WITH_SLOTS = new Set(['STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING']);

export function State({ job }) {
  const held = job.held_by && job.state === 'QUEUED';
  return html`<span class=${`state state-${job.state.toLowerCase()}`} title=${job.reason?.message}>
    ${held ? 'HELD' : job.state}</span>`;
}

// What an address has may be anything, and would become a part of the path of a call.
export const isJobId = (text) => /^job-[0-9a-z]+$/.test(text);

export const nameOf = (job) => job.name || job.id;
export const toJob = (id, tab) => link(['jobs', id], { tab });

export function JobLink({ job, children }) {
  return html`<a href=${toJob(job.id)} title=${job.id}>${children ?? nameOf(job)}</a>`;
}

export function Progress({ job }) {
  const { progress } = job;
  if (!progress) {
    return html`<span class="soft">${job.state === 'QUEUED' && job.position ? `${whole(job.position)} in the queue` : '–'}</span>`;
  }
  const { step, total_steps: total, eta_s: eta } = progress;
  const share = total ? Math.min(1, step / total) : null;
  const said = total ? `${whole(step)} of ${whole(total)} steps` : `step ${whole(step)}`;
  return html`<span class="progress">
    ${share !== null && html`<span class="meter" role="progressbar" aria-valuemin="0" aria-valuemax="100"
      aria-valuenow=${Math.round(100 * share)} aria-label=${said}><span style=${{ width: `${100 * share}%` }}></span></span>`}
    <span class="said" title=${said}>${share === null ? whole(step) : `${Math.floor(100 * share)}%`}${
      eta ? html` <span class="soft">${duration(eta)} left</span>` : ''}</span>
  </span>`;
}

// The loss that a reader looks for first.
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
