// How much a metric depends on each parameter, estimated by the server when the reader asks for it.

import { adjust } from '../lib/address.js';
import { percent, plural, whole } from '../lib/format.js';
import { html } from '../lib/html.js';
import { usePoll } from '../lib/live.js';
import { Failure, Loading } from './common.js';

const REASONS = { failed: 'failed', cancelled: 'cancelled', stopped_early: 'stopped early', unfinished: 'not finished', without_value: 'without a finite value' };

// path: of the API.
export function Importance({ path, params }) {
  const isShown = params.get('importance') === '1';
  const withStopped = params.get('stopped') === '1';
  const { data, error } = usePoll(isShown ? path : null, { include_stopped: withStopped || null }, 0);
  if (!isShown) return html`<p><button onClick=${() => adjust({ importance: '1' })}>Estimate the importance of the parameters</button></p>`;
  return html`<div class="toolbar"><label><input type="checkbox" checked=${withStopped} onChange=${(event) => adjust({ stopped: event.target.checked ? '1' : '' })} /> include trials that were stopped early</label>
      <button onClick=${() => adjust({ importance: '', stopped: '' })}>Hide</button></div>
    <${Failure} error=${error} />${!data && !error ? html`<${Loading} />` : data && html`<${Found} found=${data} />`}`;
}

function Found({ found }) {
  const leftOut = Object.entries(found.left_out).map(([why, count]) => `${whole(count)} ${REASONS[why] ?? why}`).join(', ');
  const runs = `${plural(found.num_runs, 'run')}${found.num_sampled_from > found.num_runs ? `, a sample of ${whole(found.num_sampled_from)}` : ''}`;
  const longest = Math.max(1, ...found.parameters.map(({ high }) => high ?? 0));
  const at = (share) => `${(100 * share) / longest}%`;
  return html`<div class="card"><p class="soft">${found.metric} of ${runs}${leftOut && `; left out: ${leftOut}`}.
      ${found.explained !== null && !found.reason && ` A random forest explains ${percent(found.explained)} of the variance of runs that it was not trained on.`}</p>
    ${found.reason ? html`<p class="note" role="status">There are no importances: ${found.reason.message}.</p>` : html`<table class="importances"><thead><tr><th>Parameter</th><th>Importance</th><th class="num">Share</th><th class="num">90% interval</th></tr></thead>
      <tbody>${found.parameters.map((one) => html`<tr key=${one.name}><td>${one.name}${one.same_as.length > 0 && html` <span class="soft">(always changes together with ${one.same_as.join(', ')})</span>`}</td>
        <td class="bar" aria-hidden="true"><div><span class="size" style=${{ width: at(one.importance) }}></span><span class="span" style=${{ left: at(one.low), width: at(one.high - one.low) }}></span></div></td>
        <td class="num">${percent(one.importance)}</td><td class="num">${percent(one.low)} to ${percent(one.high)}</td></tr>`)}</tbody></table>
    <p class="soft">The share of the variance of ${found.metric} among these runs that depends on the parameter, alone or together with other parameters, as far as the forest explains it. The shares can add up to more than 100%.
      The interval is computed from 30 bootstrap samples of the runs.</p>`}
    ${found.constant.length > 0 && html`<p class="soft">The same in all runs: ${found.constant.join(', ')}.</p>`}</div>`;
}
