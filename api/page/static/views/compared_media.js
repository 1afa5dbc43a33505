// The media of several jobs side by side, at the same step.

import { adjust } from '../lib/address.js';
import { get } from '../lib/api.js';
import { html, useEffect, useState } from '../lib/html.js';
import { repeat } from '../lib/live.js';
import { Failure, Loading } from '../parts/common.js';
import { ENDED } from '../parts/job_parts.js';
import { KINDS, Series, inOrder, nameOf } from './job/media.js';

const EVERY_MS = 10000;

// runs: jobs with a title. The address keeps whether the reader has opened it.
export function ComparedMedia({ runs, params }) {
  const isOpen = params.get('media') === '1';
  return html`<details open=${isOpen} onToggle=${(event) => { if (event.currentTarget.open !== isOpen) adjust({ media: event.currentTarget.open ? '1' : '' }); }}>
    <summary>Media: pictures, histograms and more that scripts report</summary>${isOpen && html`<${Opened} runs=${runs} at=${params.get('at')} />`}</details>`;
}

function Opened({ runs, at }) {
  const { found, error } = useOverviews(runs);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const rows = new Map();
  for (const run of runs) {
    for (const series of found[run.id] ?? []) {
      const name = `${KINDS[series.kind]}: ${nameOf(series)}`;
      if (!rows.has(name)) rows.set(name, { name, kind: series.kind, cells: [] });
      rows.get(name).cells.push({ run, series });
    }
  }
  if (rows.size === 0) return html`<p class="soft">None of the jobs that are shown has reported media.</p>`;
  return inOrder(rows.values()).map(({ name, cells }) => html`<h3 key=${name}>${name}</h3>
    <div class="media">${cells.map(({ run, series }) => html`<${Series} key=${run.id} jobId=${run.id} series=${series} at=${at} every=${ENDED.has(run.state) ? 0 : EVERY_MS} title=${`${nameOf(series)} of ${run.title}`} />`)}</div>`);
}

// The series of each job, by id. Polled while one of the jobs is live.
function useOverviews(runs) {
  const [state, setState] = useState({ key: null, found: null, error: null });
  const key = runs.map(({ id }) => id).join();
  const isLive = runs.some((run) => !ENDED.has(run.state));
  useEffect(() => {
    const controller = new AbortController();
    repeat(async (signal) => {
      const all = await Promise.all(runs.map(async ({ id }) => [id, (await get(`v1/jobs/${id}/media`, {}, signal)).items]));
      if (!signal.aborted) setState({ key, found: Object.fromEntries(all), error: null });
      return !isLive;
    }, { every: EVERY_MS, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, key, error })) });
    return () => controller.abort();
  }, [key, isLive]);
  return state.key === key ? state : { found: null, error: null };
}
