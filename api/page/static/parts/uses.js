// Current resource usage of ranks: processors, memory, GPUs.

import { bytes, number, percent } from '../lib/format.js';

// Samples are at least ten seconds apart.
export const SAMPLED_MS = 10000;

// The values with this name of all GPUs of a rank.
const ofGpus = (values, name) => Object.keys(values).filter((key) => /^system\/gpu\/\d+\//.test(key) && key.endsWith(`/${name}`)).sort().map((key) => values[key]);

// Columns, shown only if a rank has values: [name, (values) => text].
export const GPU_USES = [
  ['GPU', (values) => ofGpus(values, 'utilization').map(percent).join(', ')],
  ['GPU memory', (values) => ofGpus(values, 'memory_used').map(bytes).join(', ')],
  ['Power', (values) => ofGpus(values, 'power_w').map((watts) => `${Math.round(watts)} W`).join(', ')],
  ['Temperature', (values) => ofGpus(values, 'temperature_c').map((degrees) => `${Math.round(degrees)} °C`).join(', ')],
];
export const USES = [
  ['Processor', ({ 'system/cpu': cores }) => (cores === undefined ? '' : `${number(cores, 2)} cores`)],
  ['Memory', ({ 'system/memory_rss': size }) => (size === undefined ? '' : bytes(size))],
  ...GPU_USES,
];
