// A form whose fields show the server's error about them.

import { html } from '../lib/html.js';

// The field that a problem is about: `/quota/GPU` is about `quota`.
const fieldOf = (error) => error?.pointer?.split('/')[1];

// The merge patch that makes `after` of `before`, two objects of plain values.
export function changesOf(before, after) {
  const removed = Object.keys(before).filter((key) => !Object.hasOwn(after, key)).map((key) => [key, null]);
  return Object.fromEntries([...Object.entries(after).filter(([key, value]) => before[key] !== value), ...removed]);
}

// fields: [{name, title, hint, options: [[value, text]], required}]. values: texts by name. An error that is about
// none of the fields is shown below them. more: further fields. children: the buttons.
export function Form({ fields, values, onChange, error, onSubmit, more, children }) {
  const wrong = fieldOf(error);
  const isShown = fields.some(({ name }) => name === wrong);
  const submit = (event) => {
    event.preventDefault();
    onSubmit();
  };
  return html`<form class="form" onSubmit=${submit} novalidate>${fields.map(({ name, title, hint, options, required }) => {
      const common = {
        id: `field-${name}`, value: values[name], 'aria-invalid': wrong === name ? 'true' : undefined, 'aria-describedby': wrong === name ? `wrong-${name}` : hint ? `hint-${name}` : undefined,
        'aria-required': required ? 'true' : undefined, onInput: (event) => onChange({ ...values, [name]: event.target.value }),
      };
      return html`<div key=${name} class="field"><label for=${common.id}>${title}</label>
        ${options ? html`<select ...${common}>${options.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select>` : html`<input autocomplete="off" spellcheck="false" ...${common} />`}
        ${wrong === name ? html`<p id=${`wrong-${name}`} class="failed" role="alert">${error.message}${error.hint ? ` ${error.hint}` : ''}</p>` : hint && html`<p id=${`hint-${name}`} class="soft">${hint}</p>`}</div>`;
    })}
    ${more}${error && !isShown && html`<p class="failure" role="alert"><strong>${error.message}</strong>${error.hint && ` ${error.hint}`}</p>`}
    <p class="buttons">${children}</p></form>`;
}
