// Smoothing of curves. The window is a share of the x range, so that series with few and with many points
// are smoothed equally. Gaps remain gaps.

const PARTS = 200;

export const SMOOTHINGS = { '': 'exponential', mean: 'running mean', gauss: 'Gaussian', median: 'running median' };

// weight: from 0 (unchanged) to 1. kind: a key of SMOOTHINGS.
export function smoothed(xs, values, weight, kind = '') {
  const width = xs.at(-1) - xs[0];
  if (!weight || !width) return values;
  if (!kind) return exponential(xs, values, weight, width);
  // As wide as the exponential average, whose mean age is weight / (1 - weight) parts.
  return windowed(xs, values, (weight / (1 - weight)) * (width / PARTS), kind);
}

// A bias-corrected exponential moving average.
function exponential(xs, values, weight, width) {
  let mean = 0;
  let norm = 0;
  let before = xs[0];
  return values.map((value, i) => {
    if (value === null || value === undefined) return value;
    const kept = weight ** ((PARTS * (xs[i] - before)) / width || 1);
    before = xs[i];
    mean = kept * mean + (1 - kept) * value;
    norm = kept * norm + (1 - kept);
    return norm ? mean / norm : value;
  });
}

// A value of the points around each point: up to `half` away, or for a Gaussian, up to three times as far.
function windowed(xs, values, half, kind) {
  const reach = kind === 'gauss' ? 3 * half : half;
  let [from, to] = [0, 0];
  return values.map((value, i) => {
    if (value === null || value === undefined) return value;
    while (xs[from] < xs[i] - reach) from += 1;
    while (to < xs.length && xs[to] <= xs[i] + reach) to += 1;
    const near = [];
    for (let n = from; n < to; n += 1) if (values[n] !== null && values[n] !== undefined) near.push(n);
    if (kind === 'median') return medianOf(near.map((n) => values[n]));
    const weights = near.map((n) => (kind === 'gauss' && half ? Math.exp(-0.5 * ((xs[n] - xs[i]) / half) ** 2) : 1));
    const sum = weights.reduce((all, one) => all + one, 0);
    return near.reduce((all, n, k) => all + values[n] * weights[k], 0) / sum;
  });
}

// The median of at least one number.
export function medianOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
