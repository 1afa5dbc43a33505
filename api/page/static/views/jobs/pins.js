// Pinned jobs, which come first in the list, and the baseline, with which the metrics of other jobs are compared.
// An experiment keeps its pins; the pins of other lists are in the address.

import { adjust } from '../../lib/address.js';
import { changeExperiment, experimentPath } from '../../lib/experiments.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { isJobId, nameOf } from '../../parts/job_parts.js';
import { split } from './columns.js';

const MOST = 20;
const EVERY_MS = 15000;
const JOBS_MS = 4000;

// The experiment whose jobs the list shows, or null.
export function experimentOf(query) {
  const names = (query.label ?? []).filter((one) => one.startsWith('experiment=')).map((one) => one.slice('experiment='.length));
  return names.length === 1 ? names[0] : null;
}

// {jobs, baseline, pinned, has, edit, error}. jobs: the baseline and the pinned jobs with their columns, in this
// order. edit: takes a function from {pinned, baseline} to what is changed, and applies it.
export function usePins(experiment, params, columns, isOn = true) {
  const kept = usePoll(isOn && experiment ? experimentPath(experiment) : null, {}, EVERY_MS);
  const own = { pinned: split(params.get('pinned')).filter(isJobId), baseline: isJobId(params.get('baseline') ?? '') ? params.get('baseline') : null };
  const { pinned, baseline } = experiment ? { pinned: kept.data?.pinned ?? [], baseline: kept.data?.baseline ?? null } : own;
  const ids = [...new Set([baseline, ...pinned].filter(Boolean))].slice(0, MOST + 1);
  const list = usePoll(isOn && ids.length ? 'v1/jobs' : null, { where: `id in (${ids.map((id) => `"${id}"`).join(', ')})`, columns, brief: true, limit: MOST + 1 }, JOBS_MS);
  const [error, setError] = useState(null);
  useEffect(() => setError(null), [experiment]);
  const known = new Map((list.data?.items ?? []).map((job) => [job.id, job]));
  const edit = async (of) => {
    setError(null);
    if (!experiment) {
      const next = { ...own, ...of(own) };
      adjust({ pinned: next.pinned.join(','), baseline: next.baseline });
      return;
    }
    try {
      await changeExperiment(experiment, of);
    } catch (raised) {
      setError(raised);
    }
    kept.refresh();
  };
  // An experiment whose jobs were deleted, or that has none yet, has no pins.
  const isMissing = kept.error?.code === 'experiment_not_found';
  return {
    jobs: ids.map((id) => known.get(id)).filter(Boolean), baseline, pinned, edit, baselineJob: known.get(baseline) ?? null,
    error: error ?? (isMissing ? null : kept.error) ?? list.error,
  };
}

const without = (pinned, ids) => pinned.filter((id) => !ids.has(id));

// Buttons that pin the chosen jobs, and that make one of them the baseline.
export function PinButtons({ jobs, pins }) {
  const ids = new Set(jobs.map(({ id }) => id));
  const isPinned = jobs.every(({ id }) => pins.pinned.includes(id));
  const isBaseline = jobs.length === 1 && jobs[0].id === pins.baseline;
  const most = new Set([...pins.pinned, ...ids]).size;
  return html`<button disabled=${!isPinned && most > MOST} title=${`At most ${MOST} jobs are pinned`} onClick=${() => pins.edit(({ pinned }) => ({ pinned: isPinned ? without(pinned, ids) : [...without(pinned, ids), ...ids] }))}>${isPinned ? 'Unpin' : 'Pin'}</button>
    <button disabled=${jobs.length !== 1} title="Metrics of the other jobs show the difference from the baseline" onClick=${() => pins.edit(() => ({ baseline: isBaseline ? null : jobs[0].id }))}>${isBaseline ? 'No baseline' : 'Baseline'}</button>`;
}

// Whether a job is pinned or the baseline, with a button that undoes this.
export function PinMarks({ job, pins }) {
  const name = [nameOf(job), job.variant].filter(Boolean).join(' ');
  return html`${job.id === pins.baseline && html`<button class="label" aria-label=${`${name} is no longer the baseline`} onClick=${() => pins.edit(() => ({ baseline: null }))}>baseline ×</button>`}
    ${pins.pinned.includes(job.id) && html`<button class="label" aria-label=${`Unpin ${name}`} onClick=${() => pins.edit(({ pinned }) => ({ pinned: without(pinned, new Set([job.id])) }))}>pinned ×</button>`}`;
}
