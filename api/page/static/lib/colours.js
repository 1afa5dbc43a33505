// The colours of runs. A job keeps its colour in all views: the colour that a user chose, or a colour
// that is derived from its id, unless another job of the same view has that colour.

import { Store } from './stores.js';

export const NUM_COLOURS = 20;
// Colours from this number on are also drawn dashed.
export const DASHED_FROM = 10;
// How the curves of a metric are dashed if several metrics share a chart.
export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const KEPT = 'dray.colours';
const MOST_KEPT = 500;

// The job whose row or curve the reader points at, or null.
export const pointed = new Store(null);

// A hash of the text (FNV-1a).
function hash(text) {
  let found = 0x811c9dc5;
  for (let i = 0; i < text.length; i += 1) found = Math.imul(found ^ text.charCodeAt(i), 0x01000193) >>> 0;
  return found;
}

// The colour, not dashed, that the run has if no other run of the view has it. Neighbouring trials of a sweep differ.
function preferred({ id, array_id: arrayId, index, array_index: arrayIndex = index }) {
  return (arrayId && arrayIndex !== undefined && arrayIndex !== null ? hash(arrayId) + arrayIndex : hash(id)) % DASHED_FROM;
}

function kept() {
  try {
    return new Map(JSON.parse(sessionStorage.getItem(KEPT) ?? '[]'));
  } catch {
    return new Map();
  }
}

// The number of each run's colour, by id. runs: [{id, colour, array_id, array_index}]; up to twenty have
// different colours, unless users have chosen the same colour for several.
export function coloursOf(runs) {
  const before = kept();
  const found = new Map(runs.filter(({ colour }) => Number.isInteger(colour)).map(({ id, colour }) => [id, colour % NUM_COLOURS]));
  const taken = new Set(found.values());
  for (const run of runs) {
    if (found.has(run.id)) continue;
    const first = before.get(run.id) ?? preferred(run);
    let at = first;
    for (let n = 0; taken.has(at) && n < NUM_COLOURS; n += 1) at = ((first + n) % DASHED_FROM) + (n < DASHED_FROM ? 0 : DASHED_FROM);
    found.set(run.id, at);
    taken.add(at);
    if (!before.has(run.id)) before.set(run.id, at);
  }
  try {
    sessionStorage.setItem(KEPT, JSON.stringify([...before].slice(-MOST_KEPT)));
  } catch {
    // Without storage, colours are chosen anew in each view.
  }
  return found;
}
