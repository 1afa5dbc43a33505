// Formats numbers, times and sizes in the reader's time zone and language.

const WHOLE = new Intl.NumberFormat(undefined, { signDisplay: 'negative' }); // so that -0 is 0
const formats = new Map();

// A number with `options` of Intl.NumberFormat.
function formatted(value, options) {
  const key = JSON.stringify(options);
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat(undefined, { signDisplay: 'negative', ...options }));
  return formats.get(key).format(value);
}

// A number with this many digits after the point; `short` leaves out zeros at the end.
export const fixed = (value, digits, short = false) => formatted(value, { minimumFractionDigits: short ? 0 : digits, maximumFractionDigits: digits });
const TIME = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const DAY = new Intl.DateTimeFormat(undefined, { day: 'numeric', month: 'short' });
const HOUR = new Intl.DateTimeFormat(undefined, { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit' });
const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'long' });

export function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (typeof value === 'string') return value;
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return WHOLE.format(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-6) {
    const [mantissa, exponent] = value.toExponential(digits - 2).split('e');
    return `${fixed(Number(mantissa), digits - 2, true)}e${exponent}`;
  }
  if (size >= 1e4) return WHOLE.format(Math.round(value));
  return formatted(value, { maximumSignificantDigits: Math.max(digits, size >= 1000 ? 4 : 1) });
}

// A difference: `+0.012`.
export const signed = (value) => `${value > 0 ? '+' : value < 0 ? '-' : '±'}${number(Math.abs(value))}`;
export const whole = (value) => (value === null || value === undefined ? '–' : WHOLE.format(value));
export const percent = (share) => (share === null || share === undefined ? '–' : `${fixed(100 * share, share >= 0.9995 ? 0 : 1)}%`);

// `4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–';
  const all = Math.max(0, seconds);
  if (all < 10) return `${fixed(all, all < 1 ? 2 : 1, true)} s`;
  const s = Math.round(all);
  if (s < 60) return `${s} s`;
  const m = Math.floor(s / 60);
  if (m < 60) return s % 60 && m < 10 ? `${m} min ${s % 60} s` : `${m} min`;
  const h = Math.floor(m / 60);
  if (h < 48) return m % 60 ? `${h} h ${m % 60} min` : `${h} h`;
  return h % 24 ? `${Math.floor(h / 24)} d ${h % 24} h` : `${Math.floor(h / 24)} d`;
}

export const seconds = (from, to) => (new Date(to) - new Date(from)) / 1000;

export function ago(time, now) {
  const passed = (now - new Date(time)) / 1000;
  if (passed < 5) return 'now';
  return `${duration(passed < 60 ? passed : 60 * Math.floor(passed / 60))} ago`;
}

// Time until an expected moment: `in 5 min`.
export function until(time, now) {
  const left = (new Date(time) - now) / 1000;
  return left <= 1 ? 'now' : `in ${duration(left)}`;
}

// Time until an expected moment, as a range: `in 5 min to 9 min (14:20 to 14:24)`.
export function range({ at, earliest_at: earliest, latest_at: latest }, now) {
  const first = earliest ?? at;
  if (!latest) return `${until(first, now)} or later (${clock(first)})`;
  const times = clock(first) === clock(latest) ? clock(first) : `${clock(first)} to ${clock(latest)}`;
  const [soonest, last] = [until(first, now), until(latest, now)];
  return `${soonest === last ? soonest : `${soonest} to ${last.replace(/^in /, '')}`} (${times})`;
}

// Remaining time of a job: `5 min to 9 min left`; empty if no end is expected, or it has passed.
export function leftOf({ earliest_end_at: earliest, latest_end_at: latest }, now) {
  if (!latest || new Date(latest) <= now) return '';
  const [least, most] = [earliest, latest].map((time) => Math.max(0, (new Date(time) - now) / 1000));
  if (!least) return `${duration(most)} left at most`;
  return `${duration(least) === duration(most) ? '' : `${duration(least)} to `}${duration(most)} left`;
}

export function clock(time) {
  const at = new Date(time);
  const today = new Date().toDateString() === at.toDateString();
  return today ? TIME.format(at) : `${DAY.format(at)} ${TIME.format(at)}`;
}

// The beginning of an hour or a day.
export const period = (start, per) => (per === 'day' ? DAY : HOUR).format(new Date(start));

export const exactly = (time) => (time ? WHEN.format(new Date(time)) : '');

export function bytes(count) {
  if (count === null || count === undefined) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : fixed(value, value < 10 ? 2 : 1)} ${units[unit]}`;
}

export const money = (amount, currency) => `${fixed(amount, 2)} ${currency}`;
export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? '' : 's'}`;
