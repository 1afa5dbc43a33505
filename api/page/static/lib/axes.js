// The x axes of curves. Each axis maps the steps of a job to positions.

import { clockOf, counterOf, momentsOf, secondsOf, sentOf } from './series.js';

// The kinds of axes with their names, and whether they need the times of steps or the job itself.
export const AXES = {
  '': { name: 'steps' },
  epoch: { name: 'epochs', ofJob: true },
  samples: { name: 'samples', ofJob: true },
  tokens: { name: 'tokens', ofJob: true },
  time: { name: 'time', timed: true, title: 'When each step was reported' },
  seconds: { name: 'seconds', timed: true, title: 'Seconds since the first step' },
  bytes: { name: 'bytes', title: 'Bytes that the ranks have sent to each other' },
};

// The axis of an address; steps if it names none.
export const axisOf = (params) => (Object.hasOwn(AXES, params.get('x') ?? '') ? params.get('x') ?? '' : '');

// Metrics that a job can report as positions on these axes.
export const COUNTERS = {
  epoch: ['epoch', 'train/epoch'],
  samples: ['samples', 'train/samples'],
  tokens: ['tokens', 'train/tokens'],
};

// A function from a step to its position on the axis; null if the job's data doesn't have it.
export function placesOn(axis, series, job) {
  if (axis === '') return (step) => step;
  if (axis === 'time') return clockOf(momentsOf(series));
  if (axis === 'seconds') return secondsOf(series);
  if (axis === 'bytes') return sentOf(series);
  const reported = COUNTERS[axis].find((key) => series[key]?.steps.length > 1);
  return reported ? counterOf(series[reported]) : job && computed(axis, job);
}

// Epochs, samples and tokens of a recipe, computed from the job's document. A federated job counts rounds.
function computed(axis, { spec, progress }) {
  if (!spec?.recipe || spec.federated) return null;
  const { train, model } = spec;
  if (axis === 'epoch') {
    // Only without these fields is the number of steps that of whole epochs.
    if (train.max_steps || train.early_stopping || !progress?.total_steps) return null;
    return (step) => (step * train.epochs) / progress.total_steps;
  }
  const samples = train.batch_range?.[0] ?? train.global_batch_size;
  if (axis === 'samples') return (step) => step * samples;
  return model?.name === 'gpt' && model.context_length ? (step) => step * samples * model.context_length : null;
}
