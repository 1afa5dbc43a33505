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
  return { path: path.split('/').filter(Boolean).map(decoded), params: new URLSearchParams(query) };
}

export const address = new Store(read());
addEventListener('hashchange', () => address.set(read()));

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

// Change parameters of the current view, without adding an entry to the history for each letter typed.
export function adjust(changes) {
  const { path, params } = address.value;
  const all = {};
  for (const name of new Set(params.keys())) all[name] = params.getAll(name);
  history.replaceState(null, '', link(path, { ...all, ...changes }));
  address.set(read());
}
