// What users store about an experiment.

import { change, get } from './api.js';

// An address can't end with these names.
export const hasPage = (name) => !/^\.{0,2}$/.test(name);
export const experimentPath = (name) => `v1/experiments/${encodeURIComponent(name)}`;

// Change fields of an experiment, and return its new state. found: the experiment as the reader saw it. Raises
// Problem with the code `experiment_changed` if another user has changed one of the same fields since then.
export async function changeExperiment(name, found, fields) {
  for (let { revision } = found; ;) {
    try {
      return await change('PATCH', experimentPath(name), fields, {}, { 'If-Match': `"${revision}"` });
    } catch (error) {
      if (error.code !== 'experiment_changed') throw error;
      const newest = await get(experimentPath(name));
      if (Object.keys(fields).some((field) => JSON.stringify(newest[field]) !== JSON.stringify(found[field]))) throw error;
      ({ revision } = newest);
    }
  }
}
