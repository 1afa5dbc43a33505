// How this browser is signed in: by a token that is kept for this tab, or by a cookie, which is kept for all
// tabs. Scripts can't read the cookie. It permits reading only; changes also need the write key.

import { Store } from './stores.js';

const TOKEN = 'dray.token';
// Several servers can have one origin, under different paths.
const WRITE_KEY = `dray.write-key ${new URL('.', document.baseURI).pathname}`;

// The token of this tab, or else the write key of this browser; null if neither is known.
export const credential = () => sessionStorage.getItem(TOKEN) ?? localStorage.getItem(WRITE_KEY);
export const staysSignedIn = () => localStorage.getItem(WRITE_KEY) !== null;

// The server's message while it asks for a token, else null.
export const asksForToken = new Store(null);
// Whether the reader has signed in.
export const hasToken = new Store(credential() !== null);

function admit() {
  hasToken.set(true);
  asksForToken.set(null);
}

export function signIn(token) {
  sessionStorage.setItem(TOKEN, token);
  admit();
}

// The server has set the cookie, and returned its write key.
export function staySignedIn(key) {
  sessionStorage.removeItem(TOKEN);
  localStorage.setItem(WRITE_KEY, key);
  admit();
}

export const forgetToken = () => sessionStorage.removeItem(TOKEN);

export function forgetAll() {
  sessionStorage.clear(); // also removes the draft of a document
  localStorage.removeItem(WRITE_KEY);
  hasToken.set(false);
  asksForToken.set('You have signed out.');
}

// Another tab has signed in or out.
addEventListener('storage', ({ key, newValue }) => {
  if (key !== WRITE_KEY || sessionStorage.getItem(TOKEN)) return;
  if (newValue) admit();
  else forgetAll();
});

// A header can only contain bytes.
const bytesOf = (text) => String.fromCharCode(...new TextEncoder().encode(text));
export const bearer = (token) => ({ Authorization: `Bearer ${bytesOf(token)}` });

// The headers that authorise a call of this method, besides the cookie.
export function authorization(method) {
  const token = sessionStorage.getItem(TOKEN);
  if (token !== null) return bearer(token);
  const key = method === 'GET' || method === 'HEAD' ? null : localStorage.getItem(WRITE_KEY);
  return key === null ? {} : { 'X-Dray-Write-Key': key };
}

// Control and format characters, spaces other than the plain one, and characters without a shape.
const INVISIBLE = /[\p{C}\p{Z}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufe00-\ufe0f\u{e0100}-\u{e01ef}]/u;

// The error in a token that contains an invisible character, or null.
export function invisibleIn(token) {
  const characters = [...token];
  const at = characters.findIndex((one) => one !== ' ' && INVISIBLE.test(one));
  if (at < 0) return null;
  const code = characters[at].codePointAt(0).toString(16).toUpperCase().padStart(4, '0');
  return `The token contains an invisible character (U+${code}) at position ${at + 1}. Copy the token again, without the characters around it.`;
}

// The link that the server prints when it starts signs in. An address can contain only the token in the server's home.
// Otherwise, a user could send a link with the user's own token, and the reader would then work in that user's account
// without noticing.
function takeToken() {
  const token = /^#token=(dray-home-[\w-]+)$/.exec(location.hash)?.[1];
  if (!token) return;
  history.replaceState(null, '', location.pathname + location.search);
  dispatchEvent(new HashChangeEvent('hashchange')); // the token is not the address of a view
  signIn(token);
}
takeToken();
addEventListener('hashchange', takeToken);
