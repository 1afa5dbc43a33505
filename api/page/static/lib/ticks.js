// The ticks of an axis and their labels. An axis shows steps, samples, tokens, epochs, times (in Unix
// seconds), elapsed seconds, or bytes. Neighbouring ticks have different labels, however near they are to each other.

import { bytes, fixed, whole } from './format.js';

const DAY_S = 86400;
const OF_CLOCKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY_S];
// The shortest range that an axis shows: steps are integers, and clocks are not more precise.
const LEAST = { step: 1, samples: 1, tokens: 1, epoch: 0.001, time: 0.01, seconds: 0.01, bytes: 1024 };
const COUNTED = new Set(['step', 'samples', 'tokens']);

const DAY = new Intl.DateTimeFormat(undefined, { day: 'numeric', month: 'short' });
const clock = (options) => new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hourCycle: 'h23', ...options });
const MINUTES = clock({});
const SECONDS = [0, 1, 2, 3].map((digits) => clock({ second: '2-digit', ...(digits && { fractionalSecondDigits: digits }) }));

// The smallest of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, … that is not below `size`.
function decimal(size) {
  const base = 10 ** Math.floor(Math.log10(size));
  return base * [1, 2, 5, 10].find((factor) => factor * base >= size * (1 - 1e-9));
}

// Decimal places that distinguish values with this difference; one more for a 2.5.
function digitsOf(difference) {
  const digits = Math.ceil(-Math.log10(difference) - 1e-9);
  const first = difference * 10 ** digits;
  return Math.min(12, Math.max(0, Math.abs(first - Math.round(first)) > 0.01 ? digits + 1 : digits));
}

// The size in bytes of the unit in which `count` bytes are shown.
const unitOf = (count) => 1024 ** Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, count)) / 10)));

// The distance between two ticks, at least `size`, of an axis that ends at `high`.
function spacing(axis, size, high) {
  if (COUNTED.has(axis)) return Math.max(1, decimal(size));
  if (axis === 'epoch') return decimal(size);
  if (axis === 'bytes') return unitOf(high) * decimal(size / unitOf(high));
  if (size < 1) return Math.max(0.001, decimal(size));
  return OF_CLOCKS.find((one) => one >= size) ?? DAY_S * decimal(size / DAY_S);
}

// The width in pixels of a label on an axis of this span.
function labelWidth(axis, span) {
  if (axis === 'time') return span < 10 ? 84 : span < 600 ? 68 : 52;
  return { seconds: 76, bytes: 68 }[axis] ?? 56;
}

// The range that an axis shows for values from `low` to `high`, which may be equal.
export function shownRange(axis, low, high) {
  if (low === high) return [low - 1, high + 1];
  const missing = Math.max(0, LEAST[axis] - (high - low));
  return [low - missing / 2, high + missing / 2];
}

// The positions of ticks between `low` and `high` on an axis of `width` pixels.
export function ticks(axis, low, high, width) {
  const space = spacing(axis, ((high - low) * labelWidth(axis, high - low)) / Math.max(1, width), high);
  // Hours and days begin in the reader's time zone.
  const ahead = (time) => (axis === 'time' ? -60 * new Date(1000 * time).getTimezoneOffset() : 0);
  const found = [];
  const first = Math.ceil((Math.max(0, low) + ahead(low)) / space - 1e-9);
  for (let n = first; n * space - ahead(low) <= high + 1e-9 * space; n += 1) {
    const at = n * space - ahead(low);
    found.push(n * space - ahead(at));
  }
  return found;
}

// The labels of ticks.
export function tickLabels(axis, places) {
  const space = places.length > 1 ? places[1] - places[0] : 1;
  return places.map((place) => (COUNTED.has(axis) || axis === 'epoch' ? shortNumber(place, space) : textOf(axis, place, space, Math.max(...places))));
}

// A position on an axis in words, precise enough to distinguish positions that differ by `difference`.
export function placeText(axis, place, difference) {
  if (axis === 'step') return `step ${whole(Math.round(place))}`;
  if (COUNTED.has(axis)) return `${whole(Math.round(place))} ${axis}`;
  if (axis === 'epoch') return `epoch ${shortNumber(place, difference)}`;
  if (axis === 'bytes') return `${bytes(place)} sent`;
  const today = axis === 'seconds' || new Date().toDateString() === new Date(1000 * place).toDateString();
  return `${today ? '' : `${DAY.format(1000 * place)} `}${textOf(axis, place, Math.min(1, difference), place)}`;
}

function textOf(axis, place, difference, high) {
  if (axis === 'bytes') {
    const unit = unitOf(high);
    return `${fixed(place / unit, digitsOf(difference / unit), true)} ${bytes(unit).split(' ')[1]}`;
  }
  if (axis === 'seconds') return elapsed(place, difference);
  const at = new Date(Math.round(1000 * place));
  if (difference >= DAY_S || (difference >= 60 && at.getHours() + at.getMinutes() === 0)) return DAY.format(at);
  return difference >= 60 ? MINUTES.format(at) : SECONDS[Math.min(3, digitsOf(difference))].format(at);
}

// `0.2 s`, `1 min 30 s`, `5 h 10 s`.
function elapsed(seconds, difference) {
  const digits = digitsOf(difference);
  let left = Math.round(seconds * 10 ** digits);
  const parts = [];
  for (const [unit, size] of [['d', DAY_S], ['h', 3600], ['min', 60]]) {
    const count = Math.floor(left / (size * 10 ** digits));
    left -= count * size * 10 ** digits;
    if (count) parts.push(`${count} ${unit}`);
  }
  if (left || !parts.length) parts.push(`${left / 10 ** digits} s`);
  return parts.join(' ');
}

// A number, as short as the `difference` to its neighbours allows; `difference` is null if no neighbour is
// near.
export function shortNumber(value, difference = null) {
  const size = Math.abs(value);
  const near = difference || size / 1000 || 1;
  for (const [unit, letter] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (size < (unit === 1e3 ? 1e4 : unit)) continue;
    const digits = digitsOf(near / unit);
    return digits > 2 ? whole(+value.toFixed(digitsOf(near))) : `${fixed(value / unit, digits, true)}${letter}`;
  }
  if (size >= 1e-3 || size < near / 2 || digitsOf(near) <= 4) return fixed(value, digitsOf(near), true);
  return value.toExponential(digitsOf(near / 10 ** Math.floor(Math.log10(size)))).replace(/\.?0+e/, 'e');
}
