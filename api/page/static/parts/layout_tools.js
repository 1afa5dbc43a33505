// Saves the layout of the charts for all jobs of an experiment. Changes that others have saved meanwhile are merged
// chart by chart.

import { adjust } from '../lib/address.js';
import { changeExperiment, experimentPath } from '../lib/experiments.js';
import { html, useState } from '../lib/html.js';
import { isSameLayout, layoutOf, merge, titleOf, wordsOf } from '../lib/layout.js';
import { usePoll } from '../lib/live.js';
import { Dialog, Failure } from './common.js';
import { OWN } from './panels.js';

// The saved layout of an experiment: {isKnown, layout, revision, set}. Without an experiment, there is none.
export function useLayout(experiment) {
  const { data, error } = usePoll(experiment ? experimentPath(experiment) : null, { brief: true }, 0);
  const [saved, setSaved] = useState(null);
  const newest = saved?.name === experiment ? saved : data;
  return { isKnown: !experiment || Boolean(newest) || Boolean(error), layout: newest?.layout ?? null, revision: newest?.revision ?? 0, set: setSaved };
}

export function LayoutTools({ experiment, saved, options }) {
  const [conflict, setConflict] = useState(null);
  const [error, setError] = useState(null);
  const [isBusy, setIsBusy] = useState(false);
  const mine = layoutOf(options);
  const isChanged = !isSameLayout(mine, saved.layout ?? {});
  const forget = () => adjust(Object.fromEntries(OWN.map((name) => [name, ''])));
  // `choose` is called with what both have changed, and returns the choices, or null to ask the reader first.
  const save = async (base, first, choices = {}) => {
    setIsBusy(true);
    setError(null);
    let found = null;
    const fieldsOf = (newest, refusal) => {
      if (!refusal) return { layout: first.layout };
      const { layout, conflicts } = merge(base, mine, newest.layout, choices);
      if (conflicts.some(({ id }) => !(id in choices))) {
        found = { base, theirs: newest, conflicts, by: newest.updated_by };
        throw refusal;
      }
      return { layout };
    };
    try {
      saved.set(await changeExperiment(experiment, fieldsOf, first));
      forget();
    } catch (raised) {
      if (!found) setError(raised);
    } finally {
      setConflict(found);
      setIsBusy(false);
    }
  };
  const settle = (choices) => {
    const { base, theirs } = conflict;
    save(base, { layout: merge(base, mine, theirs.layout, choices).layout, revision: theirs.revision }, choices);
  };
  return html`${isChanged && html`<button disabled=${isBusy} onClick=${() => save(saved.layout ?? {}, { layout: mine, revision: saved.revision })}>Save layout for experiment ${experiment}</button>`}
    ${options.isOwn && html`<button onClick=${forget}>Reset</button>`}
    ${error && html`<${Dialog} title="The layout was not saved" onClose=${() => setError(null)}><${Failure} error=${error} /><p class="buttons"><button onClick=${() => setError(null)}>Close</button></p><//>`}
    ${conflict && html`<${Choices} ...${conflict} onClose=${() => setConflict(null)} onSettle=${settle} />`}`;
}

function Choices({ conflicts, by, onClose, onSettle }) {
  const [choices, setChoices] = useState({});
  const option = (one, side, title) => html`<label class="side"><input type="radio" name=${one.id} checked=${choices[one.id] === side} onChange=${() => setChoices((was) => ({ ...was, [one.id]: side }))} /> <strong>${title}</strong>: ${wordsOf(one, one[side])}</label>`;
  return html`<${Dialog} title="The layout has changed" onClose=${onClose}>
    <p>${by && by !== 'anonymous' ? by : 'Someone'} has saved the layout since you opened it. Your other changes are kept; these have been changed by both of you:</p>
    ${conflicts.map((one) => html`<fieldset key=${one.id}><legend>${titleOf(one)}</legend>${option(one, 'mine', 'Yours')}${option(one, 'theirs', 'Saved')}</fieldset>`)}
    <p class="buttons"><button onClick=${onClose}>Cancel</button><button class="primary" disabled=${conflicts.some(({ id }) => !choices[id])} onClick=${() => onSettle(choices)}>Save</button></p><//>`;
}
