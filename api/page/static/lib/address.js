// The address of what is shown: everything after `#`, so that it can be kept, sent and gone back to.

import { Store } from './stores.js';

function read() {
  const [path, query] = location.hash.replace(/^#\/?/, '').split('?');
  return { path: path.split('/').filter(Boolean).map(decodeURIComponent), params: new URLSearchParams(query) };
}

export const address = new Store(read());
addEventListener('hashchange', () => address.set(read()));

// The address of a place as a link; parameters that are empty are left out.
export function link(path, params = {}) {
  const kept = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of [].concat(value)) if (one !== undefined && one !== null && one !== '') kept.append(name, one);
  }
  const query = kept.toString();
  return `#/${path.map(encodeURIComponent).join('/')}${query ? `?${query}` : ''}`;
}

export const go = (path, params) => { location.hash = link(path, params); };

// Change parameters of this place, without a new entry in the history for each letter typed.
export function adjust(changes) {
  const { path, params } = address.value;
  const all = {};
  for (const name of new Set(params.keys())) all[name] = params.getAll(name);
  history.replaceState(null, '', link(path, { ...all, ...changes }));
  address.set(read());
}
