// The metrics of a job: read once, then incrementally, and in more detail for a zoomed part.

import { get } from './api.js';

export const MAX_POINTS = 800;

// Join the points of two answers. For steps that both have, the point of the later answer is used.
function joined(earlier, later) {
  if (!earlier || !earlier.steps.length) return later;
  const first = later.steps[0];
  let keep = earlier.steps.length;
  while (keep > 0 && earlier.steps[keep - 1] >= first) keep -= 1;
  const both = (name) => earlier[name] && later[name] && [...earlier[name].slice(0, keep), ...later[name]];
  return { steps: both('steps'), values: both('values'), times: both('times') };
}

// The series of one rank of a job, which grow with each `read`; with `times`, also the time of each step.
export class LiveSeries {
  constructor(jobId, { rank = 0, keys = [], times = false } = {}) {
    Object.assign(this, { jobId, rank, keys, times, series: {}, next: null });
  }

  // Read new points; returns whether there are any. Long series are read again from the beginning, so
  // that the server downsamples them evenly. If a job returns to a checkpoint, later steps are void.
  async read(signal) {
    const longest = Math.max(0, ...Object.values(this.series).map(({ steps }) => steps.length));
    const isWhole = this.next === null || longest > 2 * MAX_POINTS;
    const answer = await get(
      `v1/jobs/${this.jobId}/metrics`,
      { rank: this.rank, keys: this.keys, max_points: MAX_POINTS, after_step: isWhole ? null : this.next, times: this.times || null },
      signal,
    );
    const found = Object.entries(answer.series);
    if (isWhole) this.series = answer.series;
    else if (found.length) {
      this.series = { ...this.series };
      for (const [key, points] of found) this.series[key] = joined(this.series[key], points);
    }
    this.next = answer.next_step;
    return isWhole || found.length > 0;
  }

  newest() {
    return Math.max(-1, ...Object.values(this.series).map(({ steps }) => steps.at(-1)));
  }

  // Make the next `read` read everything.
  forget() {
    this.next = null;
  }
}

// The points from `low` to `high`, up to the same maximum number of points as for the whole series.
export async function detail(jobId, rank, keys, low, high, signal) {
  const query = { rank, keys, max_points: MAX_POINTS, after_step: Math.max(-1, Math.floor(low) - 1), until_step: Math.max(0, Math.ceil(high)) };
  return (await get(`v1/jobs/${jobId}/metrics`, query, signal)).series;
}

// The minimum and maximum of several ranks' values, in equal intervals of steps.
export function bandOf(ranks, parts = 200) {
  const all = ranks.filter((points) => points && points.steps.length);
  if (all.length < 2) return null;
  const low = Math.min(...all.map(({ steps }) => steps[0]));
  const high = Math.max(...all.map(({ steps }) => steps.at(-1)));
  const width = Math.max(1, (high - low + 1) / parts);
  const buckets = new Map();
  for (const { steps, values } of all) {
    steps.forEach((step, i) => {
      if (typeof values[i] !== 'number') return;
      const n = Math.floor((step - low) / width);
      const bucket = buckets.get(n);
      if (!bucket) buckets.set(n, { x: step, low: values[i], high: values[i] });
      else {
        bucket.low = Math.min(bucket.low, values[i]);
        bucket.high = Math.max(bucket.high, values[i]);
      }
    });
  }
  const ordered = [...buckets.entries()].sort(([a], [b]) => a - b).map(([, bucket]) => bucket);
  return { xs: ordered.map(({ x }) => x), low: ordered.map((one) => one.low), high: ordered.map((one) => one.high) };
}

// The steps with known times.
export const momentsOf = (series) =>
  Object.values(series).flatMap(({ steps, times }) => (times ?? []).map((time, i) => ({ step: steps[i], time })));

// A function from a step to the seconds since the first known step; null if no times are known.
export function secondsOf(series) {
  const moments = momentsOf(series);
  const clock = clockOf(moments);
  if (!clock) return null;
  const first = clock(Math.min(...moments.map(({ step }) => step)));
  return (step) => clock(step) - first;
}

// A function from a step to the bytes that all ranks have sent by then; null if they were not counted.
// The metric is the mean per step since the previous point.
export function sentOf(series) {
  const { steps, values } = series['sync/sent_bytes'] ?? { steps: [], values: [] };
  const known = [{ step: 0, y: 0 }];
  steps.forEach((step, i) => {
    const last = known.at(-1);
    if (step > last.step) known.push({ step, y: last.y + (step - last.step) * values[i] });
  });
  return known.length > 1 ? straight(known) : null;
}

// A function from a step to the value of a counter that the job reports; null without two values.
export function counterOf({ steps, values }) {
  const known = steps.map((step, i) => ({ step, y: values[i] })).filter(({ y }) => Number.isFinite(y));
  return known.length > 1 ? straight(known) : null;
}

// The steps whose positions are in the range, which grow with the steps: [first, last] from 0 to `newest`.
export function stepsIn(places, [low, high], newest) {
  const firstFrom = (value) => {
    let [from, to] = [0, newest + 1];
    while (from < to) {
      const middle = Math.floor((from + to) / 2);
      if (places(middle) < value) from = middle + 1;
      else to = middle;
    }
    return from;
  };
  return [Math.max(0, firstFrom(low) - 1), Math.min(newest, firstFrom(high))];
}

// The mean, minimum and maximum of several curves, [{xs, ys}], at equal distances of x. A curve counts only
// between its first and last point, and is interpolated linearly.
export function aggregate(curves, parts = 300) {
  const all = curves.map(({ xs, ys }) => {
    const known = xs.map((x, i) => ({ step: x, y: ys[i] })).filter(({ y }) => Number.isFinite(y));
    return { first: known[0]?.step, last: known.at(-1)?.step, at: straight(known) };
  }).filter(({ at }) => at);
  if (!all.length) return { xs: [], ys: [], low: [], high: [] };
  const low = Math.min(...all.map(({ first }) => first));
  const high = Math.max(...all.map(({ last }) => last));
  const count = high > low ? parts : 0;
  const rows = Array.from({ length: count + 1 }, (_, n) => {
    const x = count ? low + ((high - low) * n) / count : low;
    const values = all.filter(({ first, last }) => first <= x && x <= last).map(({ at }) => at(x));
    return { x, values };
  }).filter(({ values }) => values.length);
  return {
    xs: rows.map(({ x }) => x),
    ys: rows.map(({ values }) => values.reduce((sum, one) => sum + one, 0) / values.length),
    low: rows.map(({ values }) => Math.min(...values)),
    high: rows.map(({ values }) => Math.max(...values)),
  };
}

// A function from a step to its Unix time, interpolated linearly between known moments.
export function clockOf(moments) {
  const known = [];
  for (const moment of moments.filter(({ step, time }) => Number.isFinite(step) && time).sort((a, b) => a.step - b.step || a.time - b.time)) {
    const last = known.at(-1);
    if (last && moment.time < last.time) continue;
    if (last && last.step === moment.step) last.time = moment.time;
    else known.push({ ...moment });
  }
  return straight(known.map(({ step, time }) => ({ step, y: time })));
}

// Linear interpolation and extrapolation of points that are ordered by step; constant for one point.
function straight(known) {
  if (known.length < 2) return known.length ? () => known[0].y : null;
  return (step) => {
    let [i, end] = [1, known.length - 1];
    while (i < end) {
      const middle = (i + end) >> 1;
      if (known[middle].step < step) i = middle + 1;
      else end = middle;
    }
    const [a, b] = [known[i - 1], known[i]];
    return a.y + ((step - a.step) / (b.step - a.step)) * (b.y - a.y);
  };
}
