// The ranks of a job: their speeds, ranks that keep others waiting, and hangs.

import { clock, duration, number } from '../../lib/format.js';
import { html, useEffect, useRef, useState } from '../../lib/html.js';
import { repeat, usePoll } from '../../lib/live.js';
import { rankName, roleOf } from '../../lib/topology.js';
import { get } from '../../lib/api.js';
import { Empty, Failure, Loading } from '../../parts/common.js';
import { ENDED, RayLink, gpuOf } from '../../parts/job_parts.js';
import { link } from '../../lib/address.js';
import { SAMPLED_MS, USES } from '../../parts/uses.js';
import { Drills } from './drills.js';
import { System } from './system.js';

const MOST = 32;
const SLOW = 1.2;
const LATEST = 20;

// The newest values of each rank's series: {ranks, error}.
function useLatest(job) {
  const [found, setFound] = useState({ ranks: null, error: null });
  const isOver = ENDED.has(job.state);
  const step = useRef(0);
  step.current = job.progress?.step ?? 0;
  useEffect(() => {
    const controller = new AbortController();
    const count = Math.min(job.world_size, MOST);
    repeat(async (signal) => {
      const after = Math.max(0, step.current - 200);
      const all = [];
      for (let rank = 0; rank < count; rank += 1) {
        const { series } = await get(`v1/jobs/${job.id}/metrics`, { rank, after_step: after, max_points: 100 }, signal);
        all.push({ rank, series });
      }
      if (!signal.aborted) setFound({ ranks: all, error: null });
      return isOver;
    }, { every: 8000, signal: controller.signal, onError: (error) => error && setFound((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [job.id, job.world_size, job.attempt, isOver]);
  return found;
}

const meanOf = (points) => {
  const values = (points?.values ?? []).slice(-LATEST).filter((value) => typeof value === 'number');
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
};

// The median of at least one number.
const medianOf = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};

// Whether a rank computes longer than most other ranks. Step times don't show which rank is slow, because
// ranks that wait for each other have equal step times.
function isSlow(rank, work, rows) {
  const others = rows.filter((one) => one.rank !== rank && one.work !== null).map((one) => one.work);
  return work !== null && others.length > 0 && work > SLOW * medianOf(others);
}

const barOf = (value, longest, text) => html`<span class="progress"><span class="meter"><span style=${{ width: `${value && longest ? (100 * value) / longest : 0}%` }}></span></span><span class="numeric">${text}</span></span>`;

// Columns for workers of parameter servers: [name, (series) => text].
const OF_SERVED = [
  ['Batches', (series) => number(series['sync/clock']?.values.at(-1))],
  [`Staleness, mean of the last ${LATEST}`, (series) => number(meanOf(series['sync/staleness']), 2)],
];

const COUNTED = 'sync/staleness_count/';

// A histogram of the staleness of all updates, from the newest report.
function Staleness({ summary }) {
  const counts = Object.entries(summary).filter(([key]) => key.startsWith(COUNTED)).sort();
  if (!counts.length) return null;
  const most = Math.max(...counts.map(([, count]) => count));
  return html`<div class="card"><h2>Staleness of updates</h2><table aria-label="Staleness of updates"><thead><tr><th>Staleness</th><th>Updates so far</th></tr></thead>
      <tbody>${counts.map(([key, count]) => html`<tr key=${key}><td>${key.slice(COUNTED.length).split('_').map((one) => one.replace(/^0+(?=\d)/, '')).join('-')}</td><td>${barOf(count, most, number(count))}</td></tr>`)}</tbody></table></div>`;
}

export function Ranks({ job }) {
  const { ranks: latest, error } = useLatest(job);
  const sample = usePoll(`v1/jobs/${job.id}/metrics/system/newest`, {}, ENDED.has(job.state) ? 0 : SAMPLED_MS).data;
  const cluster = usePoll(ENDED.has(job.state) ? null : 'v1/cluster', {}, 15000).data;
  const nodes = cluster?.nodes.filter(({ jobs }) => jobs.includes(job.id)) ?? [];
  const dashboard = job.links.ray_dashboard;
  const hangs = usePoll(`v1/jobs/${job.id}/hangs`, {}, 10000);
  const used = new Map(sample?.ranks.map(({ rank, values }) => [rank, values]));
  const uses = USES.filter(([, textOf]) => [...used.values()].some(textOf));
  const served = (latest ?? []).some(({ series }) => 'sync/clock' in series) ? OF_SERVED : [];
  const rows = (latest ?? []).map(({ rank, series }) => ({
    rank,
    series,
    step: Math.max(-1, ...Object.values(series).map(({ steps }) => steps.at(-1))),
    time: meanOf(series['perf/step_time_s']),
    work: meanOf(series['perf/compute_time_s'] ?? series['perf/step_time_s']),
    wait: meanOf(series['perf/data_wait_s']),
  }));
  const longest = Math.max(...rows.map(({ time }) => time));
  return html`<div class="card"><h2>Ranks</h2><${Failure} error=${error} />${!latest && !error && html`<${Loading} />`}
      ${latest && !rows.some(({ step }) => step >= 0) && html`<${Empty}>No rank has reported a step recently.<//>`}
      <table><thead><tr><th>Rank</th><th class="num">Step</th><th>Step time, mean of the last ${LATEST}</th><th class="num">Waiting for data</th>${[...served, ...uses].map(([name]) => html`<th key=${name} class="num">${name}</th>`)}<td></td></tr></thead>
      <tbody>${rows.map(({ rank, series, step, time, wait, work }) => html`<tr key=${rank}><td>${rank} <span class="soft">${roleOf(job.spec, rank)}</span>${isSlow(rank, work, rows) ? html` <span class="note">slower than the others</span>` : ''}</td>
        <td class="num">${step >= 0 ? number(step) : '–'}</td>
        <td>${barOf(time, longest, duration(time))}</td>
        <td class="num">${wait === null ? '–' : duration(wait)}</td>
        ${served.map(([name, textOf]) => html`<td key=${name} class="num">${textOf(series)}</td>`)}
        ${uses.map(([name, textOf]) => html`<td key=${name} class="num">${textOf(used.get(rank) ?? {}) || '–'}</td>`)}
        <td class="num"><a href=${link(['jobs', job.id], { tab: 'logs', rank })}>log</a>${dashboard && html` · <${RayLink} dashboard=${dashboard} place="actors" title=${`Its actor, if it has one, is called dray:${job.id}:${job.attempt}:${roleOf(job.spec, rank)?.split(' ')[0] ?? 'worker'}:${rank}:…`}>Ray<//>`}</td></tr>`)}</tbody></table>
      ${job.world_size > MOST && html`<p class="note">The first ${MOST} of ${job.world_size} ranks are shown.</p>`}
      <p class="soft">${sample?.time && html`Resource usage at ${clock(1000 * sample.time)}. `}${nodes.length > 0 && html`They run on ${nodes.map((node, n) => html`${n > 0 && ', '}<${RayLink} dashboard=${dashboard} place=${`cluster/nodes/${node.node_id}`} title="This node in Ray's dashboard">${node.hostname}<//>${gpuOf(node) && ` (${gpuOf(node)})`}`)}.`}</p></div>
    <${Staleness} summary=${job.summary} />
    <${System} job=${job} />
    <${Drills} job=${job} />
    <div class="card"><h2>Hangs</h2><${Failure} error=${hangs.error} />
      ${hangs.data?.items.length === 0 && html`<p class="soft">None. If ranks hang, their stacks appear here.</p>`}
      ${hangs.data?.items.map((hang) => html`<details key=${hang.seq}><summary>${clock(hang.time)}: ${hang.culprits.length === 1 ? `rank ${hang.culprits[0]}` : `ranks ${hang.culprits.join(', ')}`} kept the others waiting for ${duration(hang.waited_s)}
          ${hang.phase ? ` in ${hang.phase}` : ''}${hang.step !== null ? ` at step ${hang.step}` : ''}</summary>
        ${hang.ranks.map((one) => html`<details key=${one.rank}><summary>${rankName(job.spec, one.rank)}${hang.culprits.includes(one.rank) ? ' (it kept them waiting)' : ''}: ${one.phase ?? 'unknown'}, step ${one.step ?? '–'}${one.collective !== null ? `, collective ${one.collective}` : ''}</summary>
          <pre>${one.stack || 'no stack'}</pre></details>`)}</details>`)}</div>`;
}
