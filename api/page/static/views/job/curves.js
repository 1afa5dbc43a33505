// The curves of a job, updated while it trains.

import { address, adjust } from '../../lib/address.js';
import { serverNow } from '../../lib/api.js';
import { AXES, placesOn } from '../../lib/axes.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { pace, repeat } from '../../lib/live.js';
import { LiveSeries, bandOf, clockOf, detail, stepsIn } from '../../lib/series.js';
import { useStore } from '../../lib/stores.js';
import { drawn } from '../../parts/chart.js';
import { Empty, Failure, Loading } from '../../parts/common.js';
import { ENDED } from '../../parts/job_parts.js';
import { LayoutTools, useLayout } from '../../parts/layout_tools.js';
import { ChartTools, Panel, arranged, chartOptions } from '../../parts/panels.js';
import { changedAt, marksOf } from './timeline.js';

// The polling period of the curves is longer than that of the job: reading new points costs the server five
// times as much, and moves a long curve by only a few pixels.
const EVERY_MS = 5000;
const MAX_RANKS = 16;
const MOST_SKIPPED = 2;
const GUESSED = 'guessed/';
const FIRST = ['train/loss', 'val/loss', 'val/accuracy'];

// Metrics that share a panel: a pattern of names, and the names of the panel and the curve.
const TOGETHER = [
  [/^(sync\/staleness)_(mean|p\d+|max)$/, (_, of, name) => [`${of} of all workers`, name]],
  [/^(sync\/staleness)_count\/(.+)$/, (_, of, bucket) => [`updates by ${of}`, bucket]],
  [/^federated\/(updates|dropped_out|stragglers|refused)$/, (_, name) => ['federated/clients of a round', name]],
  [/^silo\/([^/]+)\/(.+)$/, (_, silo, metric) => [`${metric} of each silo`, silo]],
];

// The order of metrics: losses, evaluations, speeds, the rest.
const rank = (key) => {
  const at = FIRST.indexOf(key);
  if (at >= 0) return at;
  const group = ['train/', 'val/', '', 'perf/', 'system/'].findIndex((prefix) => prefix && key.startsWith(prefix));
  return 10 + (group < 0 ? 2 : group);
};
export const inOrder = (keys) => [...keys].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));

// The panels of metrics: [{name, members: [{key, name}]}].
function panelsOf(keys) {
  const found = new Map();
  for (const key of inOrder(keys)) {
    const [pattern, named] = TOGETHER.find(([one]) => one.test(key)) ?? [];
    const [panel, name] = pattern ? named(...key.match(pattern)) : [key, key];
    if (!found.has(panel)) found.set(panel, []);
    found.get(panel).push({ key, name });
  }
  return [...found].map(([name, members]) => ({ name, members }));
}

export function Curves({ job, events, attempts, checkpoints }) {
  const { params } = useStore(address);
  const { experiment } = job.labels;
  const saved = useLayout(experiment);
  const options = chartOptions(params, saved.layout);
  const { x, range } = options;
  const withRanks = params.get('ranks') === '1';
  const only = params.get('keys') || '';
  const { series, error } = useSeries(job, events, Boolean(AXES[x].timed));
  const others = useRanks(job, withRanks);
  const places = useMemo(() => {
    if (!series) return null;
    const found = placesOn(x, series, job);
    return found ?? (x === 'time' ? clockOf(momentsAround(job, events, attempts, checkpoints)) : null);
  }, [x, series, job, events, attempts, checkpoints]);
  const axis = places ? x : '';
  const where = places ?? ((step) => step);
  const newest = useMemo(() => Math.max(0, ...Object.values(series ?? {}).map(({ steps }) => steps.at(-1))), [series]);
  const closer = useDetail(job.id, range && series ? stepsIn(where, range, newest) : null);

  if (!series || !saved.isKnown) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const words = only.toLowerCase().split(/\s+/).filter(Boolean);
  const all = Object.keys(series);
  const keys = all.filter((key) => words.every((word) => key.toLowerCase().includes(word)));
  const panels = arranged(panelsOf(keys), options);
  const marks = marksOf(events, attempts);
  const offered = Object.keys(AXES).filter((name) => AXES[name].timed || placesOn(name, series, job));
  return html`<${ChartTools} options=${options} offered=${offered}>
      <input type="search" aria-label="Metrics whose name contains" placeholder="metrics" value=${only} onInput=${(event) => adjust({ keys: event.target.value }, true)} />
      ${job.world_size > 1 && html`<label><input type="checkbox" checked=${withRanks} onChange=${(event) => adjust({ ranks: event.target.checked ? '1' : '' })} /> ranks as a band</label>`}
      ${experiment && html`<${LayoutTools} experiment=${experiment} saved=${saved} options=${options} />`}<//>
    <${Failure} error=${error} />
    ${!places && html`<p class="note">The job's data has no ${AXES[x].name}: the curves are drawn by steps.</p>`}
    ${!panels.length && html`<${Empty}>${all.length ? 'No matching metrics.' : ENDED.has(job.state) ? 'The job reported no metrics.' : 'No metrics yet: they appear with the first steps.'}<//>`}
    <div class="panels">${panels.map((panel) => {
      const { name, members } = panel;
      let odd = 0;
      const curves = members.map(({ key, name: curve }) => {
        const points = closer?.[key] ?? series[key];
        odd += points.values.filter((value) => typeof value === 'string').length;
        const band = withRanks && bandOf([series, ...others].map((one) => one[key]));
        return { name: curve, xs: points.steps.map(where), ...drawn(points.values), last: points.values.at(-1), band: band ? { ...band, xs: band.xs.map(where) } : undefined };
      });
      return html`<${Panel} key=${name} panel=${panel} options=${options} metrics=${inOrder(all)} curves=${curves} marks=${marks.map((mark) => ({ ...mark, x: where(mark.x) }))}
          axis=${axis || 'step'} sync=${job.id} label=${`${name}, last ${curves.map(({ name: curve, last }) => (members.length > 1 ? `${curve} ${last}` : last)).join(', ')}`}>
        ${odd > 0 && html`<p class="note">${odd} of the values shown ${odd === 1 ? 'is' : 'are'} not finite</p>`}
        ${members.some(({ key }) => key.startsWith(GUESSED)) && html`<p class="note">guessed from the script's output</p>`}<//>`;
    })}</div>`;
}

// The known moments of a job from an older dray: starts of attempts, checkpoints, recoveries and the
// newest step.
function momentsAround(job, events, attempts, checkpoints) {
  const time = (text) => (text ? new Date(text).getTime() / 1000 : null);
  const moments = attempts.map((one) => ({ step: one.resume_step, time: time(one.started_at) }));
  for (const one of checkpoints) moments.push({ step: one.step, time: time(one.created_at) });
  for (const event of events) if (Number.isFinite(event.data?.step) && event.to_state === 'RUNNING') moments.push({ step: event.data.step, time: time(event.time) });
  if (job.progress) moments.push({ step: job.progress.step, time: time(job.finished_at) ?? serverNow() / 1000 });
  return moments;
}

function useSeries(job, events, times) {
  const [state, setState] = useState({ series: null, error: null });
  const live = useRef(null);
  const wake = useRef(null);
  const now = useRef({});
  now.current = { job, events };
  useEffect(() => {
    const controller = new AbortController();
    live.current = new LiveSeries(job.id, { times });
    let seen = null;
    let skipped = 0;
    repeat(async (signal) => {
      const { state: jobState, progress } = now.current.job;
      const last = ENDED.has(jobState);
      // If the job repeats steps after a recovery, the earlier points of these steps are invalid.
      if (progress && live.current.newest() > progress.step + 1) live.current.forget();
      // Without a new step, there is rarely anything new, but values of a known step can arrive late.
      const at = `${jobState} ${progress?.step}`;
      if (at === seen && skipped < MOST_SKIPPED && !last) {
        skipped += 1;
        return false;
      }
      [seen, skipped] = [at, 0];
      const isNew = await live.current.read(signal);
      if (isNew && !signal.aborted) setState({ series: live.current.series, error: null });
      return last;
    }, { every: () => pace(changedAt(now.current.job, now.current.events), EVERY_MS), signal: controller.signal, wake, onError: (error) => setState((was) => ({ ...was, error: error?.status ? error : null })) });
    return () => controller.abort();
  }, [job.id, times]);
  useEffect(() => {
    live.current?.forget();
    wake.current?.();
  }, [job.attempt, job.state, job.first_step_at]);
  return state;
}

// The series of the other ranks, read while `on` is true.
function useRanks(job, on) {
  const [found, setFound] = useState([]);
  const isOver = ENDED.has(job.state);
  useEffect(() => {
    if (!on) return undefined;
    const controller = new AbortController();
    const ranks = [];
    for (let n = 1; n < Math.min(job.world_size, MAX_RANKS); n += 1) ranks.push(new LiveSeries(job.id, { rank: n }));
    repeat(async (signal) => {
      for (const one of ranks) await one.read(signal);
      setFound(ranks.map((one) => one.series));
      return isOver;
    }, { every: EVERY_MS, signal: controller.signal });
    return () => controller.abort();
  }, [job.id, on, job.world_size, isOver]);
  return on ? found : [];
}

// The zoomed part, in full detail.
function useDetail(jobId, range) {
  const [found, setFound] = useState(null);
  const key = range && range.join();
  useEffect(() => {
    setFound(null);
    if (!range) return undefined;
    const controller = new AbortController();
    detail(jobId, 0, [], range[0], range[1], controller.signal).then((series) => setFound({ key, series }), () => {});
    return () => controller.abort();
  }, [jobId, key]);
  return found?.key === key ? found.series : null;
}
