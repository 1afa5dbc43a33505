// The resource usage of a job's ranks over time: processors, memory, disks, network, GPUs.

import { get } from '../../lib/api.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { repeat } from '../../lib/live.js';
import { MAX_POINTS } from '../../lib/series.js';
import { Chart } from '../../parts/chart.js';
import { ENDED } from '../../parts/job_parts.js';
import { SAMPLED_MS } from '../../parts/uses.js';

// Units of series by name, with the size of the unit in the API's unit.
const UNITS = [
  [/cpu$/, 'cores', 1], [/memory/, 'GiB', 2 ** 30], [/disk|network/, 'MiB/s', 2 ** 20], [/utilization$/, '%', 0.01], [/power_w$/, 'W', 1], [/temperature_c$/, '°C', 1], [/./, '', 1],
];
const MOST_RANKS = 8;
const ORDER = ['system/cpu', 'system/memory', 'system/gpu/', 'system/disk', 'system/node/'];

const place = (key) => {
  const at = ORDER.findIndex((prefix) => key.startsWith(prefix));
  return at < 0 ? ORDER.length : at;
};

// Append new points to earlier ones. Long series are read again from the beginning instead, so that the
// server downsamples them evenly and joins old samples.
function joined(earlier, later) {
  const all = { ...earlier };
  for (const [key, { times, values }] of Object.entries(later)) {
    const before = earlier[key] ?? { times: [], values: [] };
    all[key] = { times: [...before.times, ...times], values: [...before.values, ...values] };
  }
  return all;
}

// The series of the first ranks, at most `MOST_RANKS`: [{key: {times, values}}].
function useSystem(job) {
  const [found, setFound] = useState([]);
  const isOver = ENDED.has(job.state);
  useEffect(() => {
    const controller = new AbortController();
    const ranks = Array.from({ length: Math.min(job.world_size, MOST_RANKS) }, () => ({ series: {}, next: 0 }));
    repeat(async (signal) => {
      for (const [rank, one] of ranks.entries()) {
        const longest = Math.max(0, ...Object.values(one.series).map(({ times }) => times.length));
        const isWhole = longest > 2 * MAX_POINTS;
        const answer = await get(`v1/jobs/${job.id}/metrics/system`, { rank, max_points: MAX_POINTS, after_time: isWhole ? 0 : one.next }, signal);
        one.series = isWhole ? answer.series : joined(one.series, answer.series);
        one.next = answer.next_time;
      }
      if (!signal.aborted) setFound(ranks.map(({ series }) => series));
      return isOver;
    }, { every: SAMPLED_MS, signal: controller.signal });
    return () => controller.abort();
  }, [job.id, job.world_size, isOver]);
  return found;
}

export function System({ job }) {
  const ranks = useSystem(job);
  const [range, setRange] = useState(null);
  const keys = [...new Set(ranks.flatMap((series) => Object.keys(series)))].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  if (!keys.length) return null;
  return html`<section aria-labelledby="system"><header class="head"><h2 id="system">System</h2>
      ${job.world_size > ranks.length && html`<span class="soft">the first ${ranks.length} of ${job.world_size} ranks</span>`}
      ${range && html`<button onClick=${() => setRange(null)}>Show all</button>`}</header>
    <div class="panels">${keys.map((key) => {
      const [, unit, size] = UNITS.find(([pattern]) => pattern.test(key));
      const curves = ranks.map((series, rank) => ({ rank, points: series[key] })).filter(({ points }) => points)
        .map(({ rank, points }) => ({ name: `rank ${rank}`, xs: points.times, ys: points.values.map((value) => value / size) }));
      return html`<section key=${key} class="panel" aria-label=${key}><h2 class="minor">${key} <span class="soft value">${unit}</span></h2>
        <${Chart} curves=${curves} range=${range} onZoom=${setRange} axis="time" sync=${`${job.id}-system`} label=${`${key} in ${unit}, last ${curves.map(({ name, ys }) => `${name} ${ys.at(-1)}`).join(', ')}`} /></section>`;
    })}</div></section>`;
}
