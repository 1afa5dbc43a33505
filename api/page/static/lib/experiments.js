// What users store about an experiment.

import { change, get } from './api.js';

// An address can't end with these names.
export const hasPage = (name) => !/^\.{0,2}$/.test(name);
export const experimentPath = (name) => `v1/experiments/${encodeURIComponent(name)}`;

const TRIES = 5;

// Change an experiment, and return its new state. `fieldsOf` takes the newest state, and returns the fields to
// change. If another user has changed the experiment meanwhile, it is called again, with the server's refusal as its
// second argument, which it can raise. known: the experiment as the reader saw it; without it, it is read first.
export async function changeExperiment(name, fieldsOf, known) {
  const path = experimentPath(name);
  let refusal;
  for (let n = 0; n < TRIES; n += 1) {
    const newest = (n === 0 && known) || await get(path, { brief: true });
    const fields = fieldsOf(newest, refusal);
    try {
      return await change('PATCH', path, fields, {}, { 'If-Match': `"${newest.revision}"` });
    } catch (error) {
      if (error.code !== 'experiment_changed') throw error;
      refusal = error;
    }
  }
  throw refusal;
}
