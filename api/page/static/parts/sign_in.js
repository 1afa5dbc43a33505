// The form that asks for a token, and the button that signs out.

import { change } from '../lib/api.js';
import { bearer, forgetAll, forgetToken, invisibleIn, signIn, staySignedIn, staysSignedIn } from '../lib/credentials.js';
import { html, useState } from '../lib/html.js';

export function SignIn({ message }) {
  const [token, setToken] = useState('');
  const [stays, setStays] = useState(false);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const given = token.trim();
    const found = invisibleIn(given);
    setError(found);
    if (!given || found || busy) return;
    if (!stays) return signIn(given);
    setBusy(true);
    try {
      staySignedIn((await change('POST', 'session', undefined, {}, bearer(given))).write_key);
    } catch (failed) {
      setError(failed.message);
      setBusy(false);
    }
  };
  return html`<main id="content" class="sign-in" tabindex="-1"><form onSubmit=${submit}>
    <h1>Sign in</h1><p role=${error ? 'alert' : undefined}>${error ?? message}</p>
    <label>Token <input type="password" autocomplete="off" value=${token} onInput=${(event) => setToken(event.target.value)} /></label>
    <label class="stay"><input type="checkbox" checked=${stays} onChange=${(event) => setStays(event.target.checked)} /> Stay signed in on this browser</label>
    <button class="primary" disabled=${busy}>Sign in</button>
    <p class="soft">${stays ? 'You stay signed in for 30 days, also in new tabs, until you sign out or the token is replaced. Do not choose this on a computer that others use.' : 'The token is kept until this tab is closed.'}</p>
  </form></main>`;
}

export function SignOut() {
  const [error, setError] = useState(null);
  const leave = async () => {
    try {
      if (staysSignedIn()) {
        forgetToken(); // the session's own key ends the session, even if the token is unknown by now
        await change('DELETE', 'session').catch((failed) => { if (failed.status !== 401) throw failed; });
      }
      forgetAll();
    } catch (failed) {
      setError(`You are still signed in: ${failed.message}.`);
    }
  };
  return html`<button class="quiet" onClick=${leave}>Sign out</button>${error && html`<span class="soft" role="alert">${error}</span>`}`;
}
