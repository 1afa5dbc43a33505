// Axes of values of runs: numbers, linear or logarithmic, or choices.

import { shortNumber } from './ticks.js';

const text = JSON.stringify;
const MANY = 9;
// Numbers that are all positive and differ by this factor get a logarithmic axis.
const WIDE = 100;

// An axis. share(value): the position of a run's value, from 0 to 1, NaN if it has none. place(share) and
// shareOf(place) convert positions to numbers that an address can keep: the value, or the index of a choice.
export function axisOf(name, { choices = null, min, max, log = false }) {
  if (choices) {
    const last = Math.max(1, choices.length - 1);
    const at = new Map(choices.map((choice, n) => [text(choice), choices.length > 1 ? n / last : 0.5]));
    const every = Math.ceil(choices.length / MANY);
    return { name, choices, log: false, share: (value) => at.get(text(value)) ?? NaN, ticks: choices.filter((_, n) => n % every === 0), place: (share) => share * last, shareOf: (place) => place / last };
  }
  const [scale, value] = log ? [Math.log, Math.exp] : [(one) => one, (one) => one];
  const [low, high] = [scale(min), scale(max)];
  const shareOf = (one) => (high > low ? (scale(one) - low) / (high - low) : 0.5);
  const middle = value((low + high) / 2);
  return {
    name, choices: null, log, min, max, shareOf,
    share: (one) => (typeof one === 'number' && (!log || one > 0) ? shareOf(one) : NaN),
    place: (share) => value(low + share * (high - low)),
    ticks: high > low ? [min, Number(middle.toPrecision(3)), max] : [min],
  };
}

// The axis that suits values of runs; null without any. log: true, false, or null for the scale that suits them.
export function axisOfValues(name, values, log = null) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  if (known.every((value) => typeof value === 'number' && Number.isFinite(value))) {
    const isWide = () => Math.min(...known) > 0 && Math.max(...known) / Math.min(...known) >= WIDE;
    const positive = log === true ? known.filter((value) => value > 0) : known;
    if (!positive.length) return axisOfValues(name, values, false);
    return axisOf(name, { min: Math.min(...positive), max: Math.max(...positive), log: log ?? isWide() });
  }
  const choices = new Map(known.map((value) => [text(value), value]));
  return axisOf(name, { choices: [...choices.keys()].sort().map((key) => choices.get(key)) });
}

// Round values between the ends of an axis, with their labels: [{share, text}].
export function roundTicks(axis, most) {
  if (axis.choices) {
    const every = Math.ceil(axis.choices.length / Math.max(1, most));
    return axis.choices.filter((_, n) => n % every === 0).map((choice) => ({ share: axis.share(choice), text: typeof choice === 'string' ? choice : text(choice) }));
  }
  const { min, max, log } = axis;
  if (min === max) return [{ share: 0.5, text: shortNumber(min) }];
  const found = [];
  if (log && max / min >= 10) {
    const powers = Math.floor(Math.log10(max) + 1e-9) - Math.ceil(Math.log10(min) - 1e-9);
    const every = Math.max(1, Math.ceil(powers / most));
    for (let n = Math.ceil(Math.log10(min) - 1e-9); n <= Math.log10(max) + 1e-9; n += every) found.push(10 ** n);
    if (found.length > 1) return found.map((value) => ({ share: axis.shareOf(value), text: shortNumber(value) }));
  }
  const rough = (max - min) / Math.max(1, most);
  const base = 10 ** Math.floor(Math.log10(rough));
  const space = base * ([1, 2, 5, 10].find((factor) => factor * base >= rough * (1 - 1e-9)) ?? 10);
  const values = [];
  for (let n = Math.ceil(min / space - 1e-9); n * space <= max + 1e-9 * space && values.length < 50; n += 1) values.push(n * space);
  return values.map((value) => ({ share: axis.shareOf(value), text: shortNumber(value, space) }));
}

// The ranges by which the reader selects runs, from the address: {name: [low, high]}, null for an open end.
export function brushesIn(params) {
  const found = new Map();
  for (const one of params.getAll('brush')) {
    const [, low, high, name] = /^([^:]*):([^:]*):([^]*)$/.exec(one) ?? [];
    const range = [low, high].map((end) => (end === '' || end === undefined ? null : Number(end)));
    if (name && range.every((end) => end === null || Number.isFinite(end)) && range.some((end) => end !== null)) found.set(name, range);
  }
  return found;
}

export const brushTexts = (brushes) => [...brushes].filter(([, range]) => range.some((end) => end !== null)).map(([name, range]) => `${range.map((end) => end ?? '').join(':')}:${name}`);

const NEAR = 1e-6;
const DIGITS = 6; // of the limits in the address

// The shares of a range on an axis.
export const sharesOf = (axis, [low, high] = [null, null]) => [low === null ? 0 : axis.shareOf(low), high === null ? 1 : axis.shareOf(high)];

// The range of two shares; an end of the axis is open.
export function rangeOf(axis, [low, high]) {
  const end = (share) => Number(axis.place(share).toPrecision(DIGITS));
  return [low <= NEAR ? null : end(low), high >= 1 - NEAR ? null : end(high)];
}

// Whether a run is within all ranges. axes: all axes; a range of an unknown axis selects all runs.
export function isWithin(values, axes, brushes) {
  return axes.every((axis) => {
    const [low, high] = brushes.get(axis.name) ?? [null, null];
    if (low === null && high === null) return true;
    const value = values[axis.name];
    const share = axis.share(value);
    if (!Number.isFinite(share)) return false;
    const place = axis.choices ? Math.round(axis.place(share)) : value;
    // The limits are rounded.
    const rest = (limit) => Math.abs(limit) * 10 ** (1 - DIGITS);
    return (low === null || place >= low - rest(low)) && (high === null || place <= high + rest(high));
  });
}
