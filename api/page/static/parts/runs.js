// How readers distinguish runs: by name and by colour. Also hides the curves of a run.

import { change } from '../lib/api.js';
import { DASHED_FROM, NUM_COLOURS } from '../lib/colours.js';
import { html, useState } from '../lib/html.js';
import { Failure, Menu } from './common.js';
import { Swatch } from './chart.js';
import { nameOf } from './job_parts.js';

// The shortest names that distinguish jobs of one view, by id: the variants of trials of one sweep, else names
// with variants, with the end of the id where two are equal.
export function namesOf(jobs) {
  const isOneArray = jobs.length > 1 && jobs.every(({ array_id: id, variant }) => variant && id === jobs[0].array_id);
  const names = jobs.map((job) => (isOneArray ? job.variant : [nameOf(job), job.variant].filter(Boolean).join(' ')));
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return new Map(jobs.map(({ id }, n) => [id, counts.get(names[n]) > 1 && names[n] !== id ? `${names[n]} (…${id.slice(-4)})` : names[n]]));
}

export function Eye({ name, hidden, onToggle }) {
  return html`<button class="quiet eye" aria-pressed=${!hidden} aria-label=${`Show the curves of ${name}`} title=${hidden ? 'Show its curves' : 'Hide its curves'} onClick=${onToggle}>
    <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true"><path d="M1 8c2-4 4.5-5 7-5s5 1 7 5c-2 4-4.500 5-7 5s-5-1-7-5z" /><circle cx="8" cy="8" r="2.2" />${hidden && html`<path d="M2 14L14 2" />`}</svg></button>`;
}

// The colour of a job's curves, which a user can choose for everyone. onChange: called with the new number, or
// null if the page chooses.
export function ColourPicker({ jobId, name, n, onChange }) {
  const [error, setError] = useState(null);
  const choose = async (colour) => {
    try {
      onChange((await change('PATCH', `v1/jobs/${jobId}/annotations`, { colour })).colour ?? null);
      setError(null);
    } catch (raised) {
      setError(raised);
    }
  };
  return html`<${Menu} label=${`Colour of ${name}`} text=${html`<${Swatch} n=${n} />`}>
    <div class="palette" role="group" aria-label="Colours">${Array.from({ length: NUM_COLOURS }, (_, one) => html`<button key=${one} aria-label=${`Colour ${one}${one >= DASHED_FROM ? ', dashed' : ''}`} aria-pressed=${one === n} onClick=${() => choose(one)}><${Swatch} n=${one} /></button>`)}</div>
    <button onClick=${() => choose('auto')}>Automatic</button><${Failure} error=${error} /><//>`;
}
