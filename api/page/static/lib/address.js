// The address of a view: the part after `#`, so that readers can bookmark it, send it and go back to it.

import { Store } from './stores.js';

// Decodes a part. A malformed part is returned unchanged, and matches no view.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function read() {
  const [path, query] = location.hash.replace(/^#\/?/, '').split('?');
  return { path: path.split('/').filter(Boolean).map(decoded), params: new URLSearchParams(query), chosen: history.state?.chosen ?? [] };
}

export const address = new Store(read());
addEventListener('hashchange', () => address.set(read()));
addEventListener('popstate', () => address.set(read()));

// A link to a view. Empty parameters are left out.
export function link(path, params = {}) {
  const kept = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of [].concat(value)) if (one !== undefined && one !== null && one !== '') kept.append(name, one);
  }
  const query = kept.toString();
  return `#/${path.map(encodeURIComponent).join('/')}${query ? `?${query}` : ''}`;
}

export const go = (path, params) => { location.hash = link(path, params); };

// Show another address in place of the current one, to which Back then does not lead.
export function redirect(path, params) {
  history.replaceState(null, '', link(path, params));
  address.set(read());
}

// Change parameters of the current view. Each change is an entry of the history, so that Back undoes it.
// isTyped: whether the reader types or drags; quick changes of the same parameter are then one entry.
export function adjust(changes, isTyped = false) {
  const { path, params } = address.value;
  const all = {};
  for (const name of new Set(params.keys())) all[name] = params.getAll(name);
  const next = link(path, { ...all, ...changes });
  if (next === link(path, all)) return;
  const [name, now] = [isTyped ? Object.keys(changes).join() : null, performance.now()];
  const isSame = name !== null && name === typed.name && now - typed.at < SAME_MS && location.hash === typed.hash;
  history[isSame ? 'replaceState' : 'pushState'](null, '', next);
  typed = { name, at: now, hash: location.hash };
  address.set(read());
}

const SAME_MS = 1500;
let typed = { name: null, at: 0, hash: null };

// Keep a selection in the history, but not in the address: it can have thousands of jobs.
export function select(chosen) {
  history.pushState({ chosen }, '', location.hash || '#/jobs');
  address.set(read());
}
