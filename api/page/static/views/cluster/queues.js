// The queues: their rules and jobs. Admins create, change and delete queues.

import { link } from '../../lib/address.js';
import { change } from '../../lib/api.js';
import { money, number, whole } from '../../lib/format.js';
import { html, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Dialog, Failure } from '../../parts/common.js';
import { Form, changesOf } from '../../parts/form.js';
import { amount } from './amounts.js';

const GIB = 1 << 30;

// `{GPU: 8, memory: 68719476736}` as `GPU 8, memory 64GiB`, and back.
const asText = (amounts) => Object.entries(amounts).map(([name, value]) => `${name} ${name === 'memory' && value % GIB === 0 ? `${value / GIB}GiB` : value}`).join(', ');
const isNumber = (text) => /^-?\d+(\.\d+)?([eE][+-]?\d+)?$/.test(text);
const valueOf = (text) => (isNumber(text) ? Number(text) : text);

export function amountsOf(text) {
  const found = {};
  for (const part of text.split(/[,\n]/).map((one) => one.trim()).filter(Boolean)) {
    const [, name, value] = /^(.*?)\s*[=\s]\s*(\S+)$/.exec(part) ?? [null, part, ''];
    found[name] = valueOf(value);
  }
  return found;
}

const AMOUNTS = { read: amountsOf, write: asText, isMap: true };
const NUMBER = { read: (text) => (text.trim() === '' ? null : valueOf(text.trim())), write: (value) => (value === null || value === undefined ? '' : String(value)) };
// [field, title, hint, kind]
const FIELDS = [
  ['weight', 'Weight', 'Share of the cluster, or of the parent, relative to other queues', NUMBER],
  ['quota', 'Quota', 'Guaranteed resources, such as GPU 8, CPU 64', AMOUNTS],
  ['borrowing_limit', 'Borrowing limit', 'In addition to the quota', AMOUNTS],
  ['lending_limit', 'Lending limit', 'Of the quota, to other queues', AMOUNTS],
  ['limit', 'Limit', 'Resources of all running jobs', AMOUNTS],
  ['user_limit', 'Limit of each user', 'Resources of the running jobs of a user', AMOUNTS],
  ['user_weights', 'Weights of users', 'Such as ann 2, bob 1', AMOUNTS],
  ['max_running', 'Running jobs', 'At most', NUMBER],
  ['max_running_per_user', 'Running jobs of each user', 'At most', NUMBER],
  ['max_queued', 'Waiting jobs', 'At most', NUMBER],
  ['max_queued_per_user', 'Waiting jobs of each user', 'At most', NUMBER],
  ['max_priority', 'Priority', 'At most, 0 to 100', NUMBER],
  ['default_max_runtime_s', 'Default max_runtime_s', 'In seconds, or such as 2h', NUMBER],
  ['max_runtime_s', 'Highest max_runtime_s', 'In seconds, or such as 2h', NUMBER],
  ['budget', 'Budget', 'Cost of all jobs', NUMBER],
  ['monthly_budget', 'Monthly budget', 'Cost in a month (UTC)', NUMBER],
];
const DEFAULTS = { weight: 1, max_priority: 100 };

export function Queues() {
  const { data, error, refresh } = usePoll('v1/queues', {}, 5000);
  const isAdmin = usePoll('v1/caller', {}, 0).data?.is_admin;
  const [edited, setEdited] = useState(null);
  const queues = data?.items ?? [];
  const close = () => {
    setEdited(null);
    refresh();
  };
  const amounts = (resources) => Object.entries(resources).filter(([, value]) => value).map(([name, value]) => `${amount(name, value)} ${name === 'memory' ? '' : name}`).join(', ') || '–';
  return html`<h2>Queues</h2><${Failure} error=${error} />
    <div class="card"><table><thead><tr><th>Queue</th><th class="num">Waiting</th><th class="num">Running</th><th>Held</th><th>Quota</th><th>Limit</th><th class="num">Weight</th><th class="num">Spent this month</th>${isAdmin && html`<td></td>`}</tr></thead>
    <tbody>${queues.map((queue) => html`<tr key=${queue.name}><td class="named"><a href=${link(['jobs'], { queue: queue.name })}>${queue.name}</a>${queue.parent && html` <span class="soft">in ${queue.parent}</span>`}${queue.warnings.map((one) => html`<div key=${one.code} class="note">${one.message}</div>`)}</td>
      <td class="num">${whole(queue.num_waiting)}${queue.num_held ? html` <span class="soft">(${whole(queue.num_held)} held)</span>` : ''}</td>
      <td class="num">${whole(queue.num_running)}${queue.max_running !== null ? html` <span class="soft">of ${whole(queue.max_running)}</span>` : ''}</td>
      <td class="kept">${amounts(queue.holds)}</td><td class="kept">${amounts(queue.quota)}</td><td class="kept">${amounts(queue.limit)}</td><td class="num">${number(queue.weight)}</td>
      <td class="num">${queue.spent_this_month === null ? '–' : money(queue.spent_this_month, queue.currency)}</td>
      ${isAdmin && html`<td><button aria-label=${`Edit the queue ${queue.name}`} onClick=${() => setEdited(queue)}>Edit</button></td>`}</tr>`)}</tbody></table>
    ${isAdmin && html`<p class="buttons"><button onClick=${() => setEdited({})}>New queue</button></p>`}</div>
    ${edited && html`<${Editor} queue=${edited} queues=${queues} onClose=${() => setEdited(null)} onDone=${close} />`}`;
}

// queue: an empty object for a new queue.
function Editor({ queue, queues, onClose, onDone }) {
  const isNew = queue.name === undefined;
  const start = Object.fromEntries(FIELDS.map(([name, , , { write, isMap }]) => [name, write(queue[name] ?? DEFAULTS[name] ?? (isMap ? {} : null))]));
  const [values, setValues] = useState({ name: queue.name ?? '', parent: queue.parent ?? '', ...start });
  const [error, setError] = useState(null);
  const [isBusy, setIsBusy] = useState(false);
  const [isDeleting, setIsDeleting] = useState(false);
  const attempt = async (work) => {
    setIsBusy(true);
    setError(null);
    try {
      await work();
      onDone();
    } catch (raised) {
      setIsDeleting(false);
      setError(raised);
      setIsBusy(false);
    }
  };
  const saveIt = () => attempt(() => {
    const name = values.name.trim();
    if (isNew && queues.some((one) => one.name === name)) throw Object.assign(new Error(`The queue ${name} exists already.`), { pointer: '/name' });
    // Only what the reader has changed is sent, so that the changes of another admin are kept.
    const changed = FIELDS.filter(([field]) => values[field] !== start[field]);
    const rules = Object.fromEntries(changed.map(([field, , , { read, isMap }]) => [field, isMap ? changesOf(amountsOf(start[field]), read(values[field])) : read(values[field])]));
    if ((queue.parent ?? '') !== values.parent) rules.parent = values.parent || null;
    return change('PATCH', `v1/queues/${encodeURIComponent(name)}`, rules, isNew ? { create: true } : {});
  });
  const removeIt = () => attempt(() => change('DELETE', `v1/queues/${encodeURIComponent(queue.name)}`));
  const fields = [
    ...(isNew ? [{ name: 'name', title: 'Name', required: true }] : []),
    { name: 'parent', title: 'Parent', options: [['', 'none'], ...queues.filter((one) => one.name !== queue.name).map((one) => [one.name, one.name])] },
    ...FIELDS.map(([name, title, hint]) => ({ name, title, hint })),
  ];
  return html`<${Dialog} title=${isNew ? 'New queue' : `Queue ${queue.name}`} onClose=${onClose}>
    <${Form} fields=${fields} values=${values} onChange=${setValues} error=${error} onSubmit=${saveIt}>
      ${!isNew && queue.name !== 'default' && (isDeleting
        ? html`<span>Delete this queue?</span><button type="button" class="danger" disabled=${isBusy} onClick=${removeIt}>Delete it</button><button type="button" onClick=${() => setIsDeleting(false)}>Keep it</button>`
        : html`<button type="button" class="danger" disabled=${isBusy} onClick=${() => setIsDeleting(true)}>Delete</button>`)}
      <button type="button" onClick=${onClose}>Close</button><button class="primary" disabled=${isBusy}>${isNew ? 'Create' : 'Save'}</button><//><//>`;
}
