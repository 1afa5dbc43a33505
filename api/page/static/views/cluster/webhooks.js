// Webhooks: addresses that are notified when jobs reach certain states.

import { change } from '../../lib/api.js';
import { ago, clock, exactly, whole } from '../../lib/format.js';
import { html, useState } from '../../lib/html.js';
import { useNow, usePoll } from '../../lib/live.js';
import { Copy, Dialog, Empty, Failure, Loading } from '../../parts/common.js';
import { Form } from '../../parts/form.js';
import { STATES, toJob } from '../../parts/job_parts.js';

const FINAL = ['SUCCEEDED', 'FAILED', 'CANCELLED'];
const pathOf = ({ id }) => `v1/webhooks/${encodeURIComponent(id)}`;

export function Webhooks() {
  const { data, error, refresh } = usePoll('v1/webhooks', {}, 5000);
  const caller = usePoll('v1/caller', {}, 0).data;
  const [isAdding, setIsAdding] = useState(false);
  const [made, setMade] = useState(null);
  const [failed, setFailed] = useState(null);
  const [open, setOpen] = useState(null);
  const [doomed, setDoomed] = useState(null);
  const act = async (method, path, body) => {
    setFailed(null);
    setDoomed(null);
    try {
      await change(method, path, body);
    } catch (raised) {
      setFailed(raised);
    }
    refresh();
  };
  const test = (hook) => {
    setOpen(hook.id);
    return act('POST', `${pathOf(hook)}/test`);
  };
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  return html`<section aria-label="Webhooks"><p>The server sends a message to the URL of a webhook when a job reaches a state. <a href="manual/guides/webhooks.html" target="_blank" rel="noopener">How to verify messages</a></p>
    <${Failure} error=${failed ?? error} />
    ${made && html`<div class="card" role="status"><p class="named">The secret of the new webhook signs its messages. It is shown only now: <code>${made.secret}</code> <${Copy} text=${made.secret} /></p><p class="buttons"><button onClick=${() => setMade(null)}>Close</button></p></div>`}
    ${data.items.length === 0 ? html`<${Empty}>There are no webhooks.<//>` : html`<div class="card"><table><thead><tr><th>URL</th><th>Owner</th><th>States</th><th>Jobs</th><th>Status</th><th class="num">Waiting</th><td></td></tr></thead>
      <tbody>${data.items.map((hook) => html`<${Hook} key=${hook.id} hook=${hook} isOpen=${open === hook.id} onOpen=${() => setOpen(open === hook.id ? null : hook.id)} test=${() => test(hook)}
        enable=${(enabled) => act('PATCH', pathOf(hook), { enabled })} remove=${() => setDoomed(hook)} />`)}</tbody></table></div>`}
    <p class="buttons"><button onClick=${() => setIsAdding(true)}>New webhook</button></p>
    ${isAdding && html`<${NewWebhook} isAdmin=${caller?.is_admin} onClose=${() => setIsAdding(false)} onDone=${(hook) => { setIsAdding(false); setMade(hook); refresh(); }} />`}
    ${doomed && html`<${Dialog} title="Delete this webhook?" onClose=${() => setDoomed(null)}><p>${doomed.url}</p><p>Its waiting messages are not sent. This can't be undone.</p>
      <p class="buttons"><button onClick=${() => setDoomed(null)}>Keep it</button><button class="danger" onClick=${() => act('DELETE', pathOf(doomed))}>Delete it</button></p><//>`}</section>`;
}

function Hook({ hook, isOpen, onOpen, test, enable, remove }) {
  const now = useNow(5000);
  const labels = Object.entries(hook.labels).map(([key, value]) => `${key}=${value}`);
  const jobs = [hook.all_users ? 'of all users' : `of ${hook.owner}`, hook.queue && `queue ${hook.queue}`, ...labels].filter(Boolean).join(', ');
  const status = !hook.enabled ? `disabled${hook.disabled_reason ? `: ${hook.disabled_reason.message}` : ''}` : hook.failing_since ? html`fails since <span title=${exactly(hook.failing_since)}>${ago(hook.failing_since, now)}</span>` : 'enabled';
  return html`<tr><td class="url">${hook.url}</td><td>${hook.owner}</td><td>${hook.states.join(', ').toLowerCase()}</td><td>${jobs}</td><td class=${hook.enabled && !hook.failing_since ? '' : 'failed'}>${status}</td><td class="num">${whole(hook.num_waiting)}</td>
      <td><span class="buttons"><button onClick=${test} disabled=${!hook.enabled} aria-label=${`Send a test message to ${hook.url}`}>Test</button><button aria-expanded=${isOpen} onClick=${onOpen} aria-label=${`Messages to ${hook.url}`}>Messages</button>
        <button onClick=${() => enable(!hook.enabled)} aria-label=${`${hook.enabled ? 'Disable' : 'Enable'} ${hook.url}`}>${hook.enabled ? 'Disable' : 'Enable'}</button><button class="danger" onClick=${remove} aria-label=${`Delete ${hook.url}`}>Delete</button></span></td></tr>
    ${isOpen && html`<tr><td colspan="7"><${Deliveries} hook=${hook} /></td></tr>`}`;
}

function Deliveries({ hook }) {
  const { data, error } = usePoll(`${pathOf(hook)}/deliveries`, { limit: 20 }, 2000);
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  if (!data.items.length) return html`<${Empty}>No messages were sent.<//>`;
  return html`<table><thead><tr><th>Message</th><th>Job</th><th>Status</th><th class="num">Tries</th><th>Response</th><th>Created</th></tr></thead>
    <tbody>${data.items.map((one) => html`<tr key=${one.id}><td>${one.type}</td><td>${one.job_id ? html`<a href=${toJob(one.job_id)}>${one.job_id}</a>` : '–'}</td><td>${one.status}</td><td class="num">${whole(one.tries)}</td>
      <td class="sentence">${one.answer ? [one.answer.status, one.answer.error ?? one.answer.body].filter(Boolean).join(': ') : '–'}</td><td class="kept" title=${exactly(one.created_at)}>${clock(one.created_at)}</td></tr>`)}</tbody></table>`;
}

function NewWebhook({ isAdmin, onClose, onDone }) {
  const queues = usePoll('v1/queues', {}, 0).data?.items ?? [];
  const [values, setValues] = useState({ url: '', format: 'json', queue: '', labels: '' });
  const [states, setStates] = useState(FINAL);
  const [isForAll, setIsForAll] = useState(false);
  const [error, setError] = useState(null);
  const [isBusy, setIsBusy] = useState(false);
  const create = async () => {
    setIsBusy(true);
    setError(null);
    const labels = Object.fromEntries(values.labels.split(',').map((one) => one.trim()).filter(Boolean).map((one) => [one.split('=')[0].trim(), one.split('=').slice(1).join('=').trim()]));
    try {
      onDone(await change('POST', 'v1/webhooks', { url: values.url.trim(), format: values.format, states, labels, ...(values.queue && { queue: values.queue }), ...(isForAll && { all_users: true }) }));
    } catch (raised) {
      setError(raised);
      setIsBusy(false);
    }
  };
  const toggle = (state) => setStates(states.includes(state) ? states.filter((one) => one !== state) : STATES.filter((one) => one === state || states.includes(one)));
  const fields = [
    { name: 'url', title: 'URL', hint: 'Begins with https://', required: true },
    { name: 'format', title: 'Format', options: [['json', 'JSON'], ['slack', 'Slack, Mattermost and others']] },
    { name: 'queue', title: 'Jobs in the queue', options: [['', 'all queues'], ...queues.map(({ name }) => [name, name])] },
    { name: 'labels', title: 'Jobs with the labels', hint: 'Such as team=vision, stage=prod' },
  ];
  const more = html`<fieldset><legend>States</legend>${STATES.map((state) => html`<label key=${state}><input type="checkbox" checked=${states.includes(state)} onChange=${() => toggle(state)} /> ${state.toLowerCase()}</label> `)}</fieldset>
    ${isAdmin && html`<fieldset><legend>Users</legend><label><input type="checkbox" checked=${isForAll} onChange=${() => setIsForAll(!isForAll)} /> jobs of all users</label></fieldset>`}`;
  return html`<${Dialog} title="New webhook" onClose=${onClose}><${Form} fields=${fields} values=${values} onChange=${setValues} error=${error} onSubmit=${create} more=${more}>
      <button type="button" onClick=${onClose}>Close</button><button class="primary" disabled=${isBusy}>Create</button><//><//>`;
}
