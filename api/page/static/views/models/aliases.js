// The aliases of a version. The model's owner and admins can move and remove them.

import { change } from '../../lib/api.js';
import { html, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Failure } from '../../parts/common.js';

const ALIAS = '[a-z][a-z0-9_.\\-]*';

// model: the model, with the versions of its aliases. path: of its aliases.
export function Aliases({ model, version, path, refresh }) {
  const user = usePoll('v1/caller', {}, 0).data;
  const [alias, setAlias] = useState('');
  const [error, setError] = useState(null);
  const may = user && (user.is_admin || user.name === model.owner);
  const act = async (method, name, body) => {
    try {
      await change(method, `${path}/${encodeURIComponent(name)}`, body);
      setError(null);
      setAlias('');
    } catch (raised) {
      setError(raised);
    }
    refresh();
  };
  // If another user has moved the alias since it was shown, the alias is not removed.
  const move = (event) => {
    event.preventDefault();
    if (alias) act('PUT', alias, { version, from_version: model.aliases[alias] ?? null });
  };
  const here = Object.keys(model.aliases).filter((name) => model.aliases[name] === version);
  const others = Object.entries(model.aliases).filter(([, other]) => other !== version);
  return html`<div class="buttons" role="group" aria-label="Aliases">
      ${here.map((name) => html`<span key=${name} class="label tag">${name}${may && html`<button class="quiet" aria-label=${`Remove the alias ${name}`} onClick=${() => act('DELETE', name)}>×</button>`}</span>`)}
      ${may ? html`<form onSubmit=${move}><input aria-label=${`An alias for version ${version}; Enter moves it here`} placeholder="move an alias here" list="aliases" pattern=${ALIAS} maxlength="63"
          title="Lowercase letters, digits and _ . -, beginning with a letter" value=${alias} onInput=${(event) => setAlias(event.target.value)} />
        <datalist id="aliases">${others.map(([name, other]) => html`<option key=${name} value=${name}>version ${other}</option>`)}</datalist></form>`
        : user && html`<span class="soft">Only ${model.owner}, the owner, and admins can move aliases.</span>`}</div>
    <${Failure} error=${error} />`;
}
