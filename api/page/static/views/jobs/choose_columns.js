// The dialog that chooses the columns of the list of jobs.

import { adjust } from '../../lib/address.js';
import { html, useState } from '../../lib/html.js';
import { Dialog } from '../../parts/common.js';
import { OWN, USUAL, columnOf } from './columns.js';

// shown: the names of the columns in their order. offers: names of metrics, parameters and labels to complete.
export function ColumnDialog({ shown, offers, onClose }) {
  const [typed, setTyped] = useState('');
  const set = (names) => adjust({ columns: names.join() === USUAL.join() ? '' : names.join(',') });
  const add = (event) => {
    event.preventDefault();
    const name = typed.trim();
    if (name && !shown.includes(name)) set([...shown, name]);
    setTyped('');
  };
  const move = (name, by) => {
    const at = shown.indexOf(name);
    const moved = shown.filter((other) => other !== name);
    moved.splice(Math.max(0, at + by), 0, name);
    set(moved);
  };
  return html`<${Dialog} title="Columns" onClose=${onClose}>
    <form onSubmit=${add}><label>Add a metric, a parameter or a label <input list="columns" value=${typed} placeholder="best:val/accuracy" spellcheck="false" autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /></label> <button>Add</button>
      <datalist id="columns">${offers.map((name) => html`<option key=${name} value=${name} />`)}</datalist></form>
    <ol class="columns">${shown.map((name, n) => html`<li key=${name}><span>${columnOf(name).title}</span>
      <button class="quiet" disabled=${n === 0} aria-label=${`Move ${columnOf(name).title} to the left`} onClick=${() => move(name, -1)}>↑</button>
      <button class="quiet" disabled=${n === shown.length - 1} aria-label=${`Move ${columnOf(name).title} to the right`} onClick=${() => move(name, 1)}>↓</button>
      <button class="quiet" disabled=${shown.length < 2} aria-label=${`Remove ${columnOf(name).title}`} onClick=${() => set(shown.filter((other) => other !== name))}>×</button></li>`)}</ol>
    <p class="buttons">${Object.entries(OWN).filter(([name]) => !shown.includes(name)).map(([name, { title }]) => html`<button key=${name} onClick=${() => set([...shown, name])}>+ ${title}</button>`)}</p>
    <p class="buttons"><button onClick=${() => set(USUAL)}>Usual columns</button><button class="primary" onClick=${onClose}>Close</button></p><//>`;
}
