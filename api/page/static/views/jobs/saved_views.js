// Saved views: lists of jobs that users keep under a name.

import { address, adjust, link, redirect } from '../../lib/address.js';
import { change, get } from '../../lib/api.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { useStore } from '../../lib/stores.js';
import { Copy, Dialog, Empty, Failure, Loading } from '../../parts/common.js';
import { differences, paramsOf, savedOf } from './query.js';

const EVERY_MS = 30000;
const PAGE = 200;
const NAME = '[a-z0-9][a-z0-9_\\-]*';

const pathOf = (name) => `v1/views/${encodeURIComponent(name)}`;
const hrefOf = ({ owner, name }) => link(['views', owner, name]);
// `OWNER/NAME`. An owner's name can contain `/`.
const parted = (text) => /^(?:(.*)\/)?([^/]*)$/s.exec(text).slice(1);

// Opens a view by its address, `#/views/OWNER/NAME`.
export function OpenView({ path: [, owner, name] }) {
  const [error, setError] = useState(null);
  useEffect(() => {
    const controller = new AbortController();
    if (!name) {
      setError(new Error('The address of a view is #/views/OWNER/NAME.'));
      return undefined;
    }
    get(pathOf(name), { owner }, controller.signal).then(
      (view) => redirect(['jobs'], { ...paramsOf(view.query), view: `${view.owner}/${view.name}` }),
      (raised) => { if (!controller.signal.aborted) setError(raised); },
    );
    return () => controller.abort();
  }, [owner, name]);
  return error ? html`<h1>View</h1><${Failure} error=${error} /><p><a href="#/jobs">Go to the jobs</a></p>` : html`<${Loading} />`;
}

// The view that the address names, with what has changed since it was saved; and, with `isOpen`, the dialog of
// all views.
export function SavedViews({ isOpen, onClose }) {
  const { params } = useStore(address);
  const [owner, name] = parted(params.get('view') ?? '');
  const saved = usePoll(name ? pathOf(name) : null, { owner }, EVERY_MS);
  const mine = usePoll('v1/views', { owner: '@me', limit: PAGE }, EVERY_MS);
  const [error, setError] = useState(null);
  const now = savedOf(params);
  const view = saved.data;
  const isMine = mine.data?.items.some((one) => (!owner || one.owner === owner) && one.name === name);
  const changes = view ? differences(view.query, now) : [];
  const refresh = () => {
    saved.refresh();
    mine.refresh();
  };
  const put = async (as, project) => {
    const stored = await change('PUT', pathOf(as), { query: now, project: project || null });
    adjust({ view: `${stored.owner}/${stored.name}` });
    setError(null);
    refresh();
  };
  return html`${name && html`<span class="view">view <strong>${params.get('view')}</strong>${changes.length > 0 && html` <span class="note">not saved: ${changes.join(', ')}</span>`}
      ${changes.length > 0 && isMine && html`<button onClick=${() => put(name, view.project).catch(setError)}>Save</button>`}
      ${changes.length > 0 && html`<a class="button" href=${hrefOf(view)}>Undo the changes</a>`}
      <button class="quiet" aria-label=${`Leave the view ${name}`} onClick=${() => adjust({ view: '' })}>×</button></span>`}
    <${Failure} error=${error ?? (name ? saved.error : null)} />
    ${isOpen && html`<${ViewsDialog} mine=${mine} project=${isMine ? view?.project : null} put=${put} refresh=${refresh} onClose=${onClose} />`}`;
}

function ViewsDialog({ mine, project, put, refresh, onClose }) {
  const [typed, setTyped] = useState('');
  const [of, setOf] = useState(project ?? '');
  const [only, setOnly] = useState('');
  const [error, setError] = useState(null);
  const every = usePoll('v1/views', { limit: PAGE, project: only }, EVERY_MS);
  const own = mine.data?.items ?? [];
  const me = own[0]?.owner;
  const others = (every.data?.items ?? []).filter((view) => view.owner !== me);
  const isKnown = own.some((view) => view.name === typed);
  const act = (work) => work().then(() => setError(null), setError).then(() => { refresh(); every.refresh(); });
  const save = (event) => {
    event.preventDefault();
    put(typed, of.trim()).then(onClose, setError);
  };
  return html`<${Dialog} title="Views" onClose=${onClose}>
    <form onSubmit=${save} class="save"><p><label>Save this list as <input required pattern=${NAME} maxlength="63" title="a-z, 0-9, _ and -; begins with a letter or a digit" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></label></p>
      <p><label>for the project (optional) <input maxlength="255" value=${of} onInput=${(event) => setOf(event.target.value)} /></label></p>
      ${isKnown && html`<p class="note">This replaces your view ${typed}.</p>`}
      <p><button class="primary">${isKnown ? 'Replace' : 'Save'}</button></p></form>
    <${Failure} error=${error ?? mine.error ?? every.error} />
    <h3>Your views</h3>
    ${own.length ? html`<ul class="views">${own.map((view) => html`<${OwnView} key=${view.name} view=${view} own=${own} act=${act} onClose=${onClose} />`)}</ul>` : html`<${Empty}>You have saved no views.<//>`}
    <h3>Views of other users</h3>
    <p><label>of the project <input type="search" value=${only} onChange=${(event) => setOnly(event.target.value.trim())} /></label></p>
    ${others.length ? html`<ul class="views">${others.map((view) => html`<li key=${hrefOf(view)}><a href=${hrefOf(view)} onClick=${onClose}>${view.owner}/${view.name}</a> ${view.project && html`<span class="soft">${view.project}</span>`}
      <${Copy} text=${addressOf(view)} label="Copy the link" /></li>`)}</ul>` : html`<${Empty}>There are none.<//>`}
    ${[mine, every].some(({ data }) => data?.next_cursor) && html`<p class="soft">Only the first ${PAGE} views are listed. <code>dray views ls</code> lists all.</p>`}
    <p class="buttons"><button onClick=${onClose}>Close</button></p><//>`;
}

const addressOf = (view) => new URL(hrefOf(view), location.href).href;

// A view of the reader, which can be renamed and deleted.
function OwnView({ view, own, act, onClose }) {
  const [doing, setDoing] = useState(null);
  const [name, setName] = useState(view.name);
  const isTaken = name !== view.name && own.some((other) => other.name === name);
  const rename = (event) => {
    event.preventDefault();
    setDoing(null);
    if (name === view.name) return;
    act(async () => {
      await change('PUT', pathOf(name), { query: view.query, project: view.project });
      await change('DELETE', pathOf(view.name));
      if (address.value.params.get('view') === `${view.owner}/${view.name}`) adjust({ view: `${view.owner}/${name}` });
    });
  };
  const remove = () => act(async () => {
    await change('DELETE', pathOf(view.name));
    if (address.value.params.get('view') === `${view.owner}/${view.name}`) adjust({ view: '' });
  });
  if (doing === 'rename') {
    return html`<li><form onSubmit=${rename}><input aria-label=${`New name of ${view.name}`} required pattern=${NAME} maxlength="63" value=${name} onInput=${(event) => setName(event.target.value)} />
      <button class="primary" disabled=${isTaken}>Rename</button> <button type="button" onClick=${() => setDoing(null)}>Keep the name</button>${isTaken && html` <span class="note">You have a view with this name.</span>`}</form></li>`;
  }
  if (doing === 'delete') {
    return html`<li>Delete the view ${view.name}? <button class="danger" onClick=${remove}>Delete</button> <button onClick=${() => setDoing(null)}>Keep it</button></li>`;
  }
  return html`<li><a href=${hrefOf(view)} onClick=${onClose}>${view.name}</a> ${view.project && html`<span class="soft">${view.project}</span>`}
    <${Copy} text=${addressOf(view)} label="Copy the link" /><button class="quiet" aria-label=${`Rename ${view.name}`} onClick=${() => setDoing('rename')}>Rename</button>
    <button class="quiet" aria-label=${`Delete ${view.name}`} onClick=${() => setDoing('delete')}>Delete</button></li>`;
}
