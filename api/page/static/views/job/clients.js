// The clients of a federated job outside of the cluster, and their current round.

import { ago, clock, exactly, whole } from '../../lib/format.js';
import { html } from '../../lib/html.js';
import { useNow, usePoll } from '../../lib/live.js';
import { Failure, Loading } from '../../parts/common.js';
import { ENDED } from '../../parts/job_parts.js';

const EVERY_MS = 5000;
const MOST = 500;

export function Clients({ job }) {
  const { data, error } = usePoll(`v1/jobs/${job.id}/clients`, {}, ENDED.has(job.state) ? 0 : EVERY_MS);
  const now = useNow();
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const { items } = data;
  const time = (at) => html`<td title=${exactly(at)}>${at ? ago(at, now) : '–'}</td>`;
  return html`<div class="card"><h2>Clients outside of the cluster</h2><${Failure} error=${error} /><p><${Round} job=${job} page=${data} now=${now} /></p>
    ${items.length === 0 ? html`<p class="soft">No clients have been invited yet. <code>dray federate invite ${job.id}</code> creates tokens for clients.</p>` : html`<table>
      <thead><tr><th>Client</th><th class="num">Updates</th><th>Newest update</th><th>Joined</th><th>Invited</th></tr></thead>
      <tbody>${items.slice(0, MOST).map((one) => html`<tr key=${one.client}><td>${one.client}${noteOf(one, data) && html` <span class="note">${noteOf(one, data)}</span>`}</td>
        <td class="num">${whole(one.num_sent)}</td>${time(one.sent_at)}${time(one.joined_at)}<td title=${exactly(one.created_at)}>${ago(one.created_at, now)} by ${one.invited_by}</td></tr>`)}</tbody></table>`}
    ${items.length > MOST && html`<p class="note">The first ${MOST} of ${whole(items.length)} clients are shown.</p>`}</div>`;
}

function noteOf({ client, joined_at: joined }, { missing }) {
  if (!joined) return 'has not joined';
  return missing.includes(client) ? 'has not answered' : '';
}

function Round({ job, page, now }) {
  if (page.round === null) return 'No round has started.';
  const all = whole(job.spec.federated.clients_per_round);
  const updates = `updates of ${whole(page.num_sent)} of ${all} clients`;
  if (!page.is_open) return html`Round <strong>${whole(page.round)}</strong> has ended, with ${updates}.`;
  const isLate = new Date(page.closes_at) <= now;
  return html`Round <strong>${whole(page.round)}</strong> is open, with ${updates} so far. ${isLate
    ? `Its deadline has passed: it ends with updates from any ${whole(page.quorum)} clients.`
    : `It ends with updates from all ${all} clients, or at ${clock(page.closes_at)} with ${whole(page.quorum)} of them.`}`;
}
