// The filters of the list of jobs, and the field for a search expression.

import { adjust } from '../../lib/address.js';
import { hasToken } from '../../lib/api.js';
import { html, useEffect, useLayoutEffect, useRef, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { STATES } from '../../parts/job_parts.js';
import { OTHERS } from './query.js';

const GROUPS = [
  ['all', 'All', []],
  ['waiting', 'Waiting', ['QUEUED']],
  ['running', 'Running', ['STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING']],
  ['ended', 'Ended', ['SUCCEEDED', 'FAILED', 'CANCELLED']],
  ['failed', 'Failed', ['FAILED']],
];

export function Filters({ params, queues }) {
  const states = params.getAll('state');
  const [text, setText] = useState(params.get('text') || '');
  const [label, setLabel] = useState('');
  const typing = useRef(null);
  useLayoutEffect(() => setText(params.get('text') || ''), [params.get('text')]); // before the reader can type
  useEffect(() => () => clearTimeout(typing.current), []);
  const type = (value) => {
    setText(value);
    clearTimeout(typing.current);
    typing.current = setTimeout(() => adjust({ text: value.trim() }, true), 250);
  };
  const same = (group) => group.length === states.length && group.every((state) => states.includes(state));
  const labels = params.getAll('label');
  const addLabel = (event) => {
    event.preventDefault();
    if (!/^[^=]+=/.test(label)) return;
    adjust({ label: [...new Set([...labels, label])] });
    setLabel('');
  };
  return html`<div class="filters" role="search">
    <div class="segments" role="group" aria-label="States">
      ${GROUPS.map(([name, title, group]) => html`<button key=${name} aria-pressed=${same(group)} onClick=${() => adjust({ state: group })}>${title}</button>`)}
    </div>
    <select aria-label="State" value=${states.length === 1 ? states[0] : ''} onChange=${(event) => adjust({ state: event.target.value })}>
      <option value="">any state</option>${STATES.map((state) => html`<option key=${state} value=${state}>${state}</option>`)}</select>
    <select aria-label="Queue" value=${params.get('queue') || ''} onChange=${(event) => adjust({ queue: event.target.value })}>
      <option value="">any queue</option>${queues.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
    <input type="search" placeholder="name or id" aria-label="Name or id" value=${text} onInput=${(event) => type(event.target.value)} />
    <form onSubmit=${addLabel}><input placeholder="label=value" aria-label="Label, as key=value; Enter adds it" value=${label}
      pattern="[^=]+=.*" onInput=${(event) => setLabel(event.target.value)} /></form>
    ${labels.map((one) => html`<button key=${one} class="label" aria-label=${`Remove the label ${one}`}
      onClick=${() => adjust({ label: labels.filter((other) => other !== one) })}>${one} ×</button>`)}
    ${Object.entries(OTHERS).filter(([name]) => params.get(name)).map(([name, title]) => html`<button key=${name} class="label" aria-label=${`Remove the filter ${title} ${params.get(name)}`}
      onClick=${() => adjust({ [name]: '' })}><span class="soft">${title}</span> ${params.get(name)} ×</button>`)}
    ${hasToken.value && html`<label><input type="checkbox" checked=${Boolean(params.get('mine'))}
      onChange=${(event) => adjust({ mine: event.target.checked ? '1' : '' })} /> mine</label>`}
  </div>`;
}

// The names of queues.
export const useQueues = () => (usePoll('v1/queues', {}, 30000).data?.items ?? []).map(({ name }) => name);

// The search expression, completed as the reader types, and its error below the column that the server names.
// known: as `completions` takes it. onFocus: called when the reader comes to the field.
export function Search({ where, error, known, onFocus }) {
  const [text, setText] = useState(where);
  const [offers, setOffers] = useState(null); // {from, options, chosen}
  const complete = useRef(null);
  const caret = useRef(null);
  const field = useRef(null);
  useLayoutEffect(() => setText(where), [where]);
  const [, column, message] = error?.message.match(/^column (\d+): ([^]*)$/) ?? [null, null, error?.message];
  // The server counts characters; JavaScript counts UTF-16 code units.
  const before = column ? [...where].slice(0, column - 1).join('') : where;
  useEffect(() => {
    if (error && document.activeElement === field.current) field.current.setSelectionRange(before.length, before.length);
  }, [error]);
  useLayoutEffect(() => {
    if (caret.current === null) return;
    field.current.setSelectionRange(caret.current, caret.current);
    caret.current = null;
    offer();
  }, [text]);
  const search = (event) => {
    event.preventDefault();
    setOffers(null);
    adjust({ where: text.trim() });
  };
  const offer = async () => {
    complete.current ??= (await import('../../lib/completion.js')).completions;
    if (document.activeElement !== field.current) return;
    const found = complete.current(field.current.value, field.current.selectionStart, known);
    setOffers(found.options.length ? { ...found, chosen: -1 } : null);
  };
  const take = (option) => {
    const end = field.current.selectionStart;
    caret.current = offers.from + option.length;
    setText(text.slice(0, offers.from) + option + text.slice(end));
  };
  const key = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && !offers) offer();
    else if (step) setOffers({ ...offers, chosen: (offers.chosen + step + offers.options.length + (offers.chosen < 0 && step < 0 ? 1 : 0)) % offers.options.length });
    else if (event.key === 'Enter' && offers?.chosen >= 0) take(offers.options[offers.chosen]);
    else if (event.key === 'Escape' && offers) setOffers(null);
    else return;
    event.preventDefault();
  };
  return html`<form class="where" role="search" aria-label="Search by an expression" onSubmit=${search}>
    <div class="edit"><input type="text" inputmode="search" ref=${field} maxlength="4000" spellcheck="false" autocomplete="off" aria-label="Expression; Enter searches" placeholder="val/accuracy > 0.9 and train.optimizer.lr < 0.01 and 'good' in tags"
      role="combobox" aria-autocomplete="list" aria-expanded=${Boolean(offers)} aria-controls="completions" aria-activedescendant=${offers?.chosen >= 0 ? `completion-${offers.chosen}` : undefined}
      value=${text} aria-invalid=${Boolean(error)} aria-describedby=${error ? 'where-error' : null} onKeyDown=${key} onFocus=${onFocus} onBlur=${() => setTimeout(() => setOffers(null), 150)}
      onInput=${(event) => { setText(event.target.value); offer(); }} />
    <ul class="offers" id="completions" role="listbox" aria-label="Completions" hidden=${!offers}>${offers?.options.map((option, n) => html`<li key=${option} id=${`completion-${n}`} role="option" aria-selected=${n === offers.chosen}
      onMouseDown=${(event) => { event.preventDefault(); take(option); }}><code>${option}</code></li>`)}</ul></div>
    <button>Search</button>
    ${where && html`<button type="button" class="quiet" onClick=${() => adjust({ where: '' })}>Clear</button>`}
    ${error && html`<pre id="where-error" role="alert">${`${where}\n`}<span aria-hidden="true"><span class="before">${before}</span>^ </span><strong>${message}</strong>${column && html`<span class="hidden"> at column ${column}</span>`}${error.hint && `\n${error.hint}`}</pre>`}
  </form>`;
}
