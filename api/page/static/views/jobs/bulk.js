// Actions on the chosen jobs. Each shows first what the server would change, from its dry run.

import { go } from '../../lib/address.js';
import { change } from '../../lib/api.js';
import { plural } from '../../lib/format.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { Dialog, Failure } from '../../parts/common.js';
import { ENDED, nameOf } from '../../parts/job_parts.js';
import { useQueues } from './filters.js';

const MOST_COMPARED = 20;
const IDS_OF_A_CALL = 100; // as many as an `in` of a search may have
const DELAY_MS = 300;

// title: of the dialog, for `3 jobs`. does: the button that does it. keeps: the button that does not.
const ACTIONS = {
  cancel: { title: (jobs) => `Cancel ${jobs}?`, does: () => 'Cancel them', keeps: 'Keep them', note: 'Their metrics, logs and checkpoints are kept.', isDanger: true },
  delete: { title: (jobs) => `Delete ${jobs}?`, does: () => 'Delete them', keeps: 'Keep them', note: "Their logs, checkpoints and artifacts are deleted too. This can't be undone.", isDanger: true },
  hold: { title: (jobs) => `Hold ${jobs}?`, does: () => 'Hold them', keeps: 'Close', note: 'Held jobs do not start until they are released.' },
  release: { title: (jobs) => `Release ${jobs}?`, does: () => 'Release them', keeps: 'Close' },
  priority: { title: () => 'Change priority', does: (jobs) => `Change ${jobs}`, keeps: 'Close' },
  move: { title: (jobs) => `Move ${jobs} to another queue`, does: (jobs) => `Move ${jobs}`, keeps: 'Close', note: 'Only waiting jobs can be moved.' },
  tag: { title: () => 'Change tags', does: (jobs) => `Change ${jobs}`, keeps: 'Close' },
};
const words = (text) => text.split(/[\s,]+/).filter(Boolean);

// The calls that apply an action to these jobs: jobs of each owner, as many as fit into one search.
function callsFor(jobs) {
  const calls = [];
  for (const owner of new Set(jobs.map((job) => job.owner))) {
    const ids = jobs.filter((job) => job.owner === owner).map(({ id }) => id);
    for (let n = 0; n < ids.length; n += IDS_OF_A_CALL) {
      const some = ids.slice(n, n + IDS_OF_A_CALL);
      calls.push({ filter: { owner, where: `id in (${some.map((id) => `"${id}"`).join(', ')})` }, max: some.length });
    }
  }
  return calls;
}

// The results of all calls, summed.
async function run(calls, action, parameters, isDry) {
  const sum = { changed: 0, unchanged: 0, refused: 0, other_owners: 0, problems: [] };
  for (const call of calls) {
    const found = await change('POST', 'v1/jobs/bulk', { action, parameters, ...call, dry_run: isDry });
    for (const name of ['changed', 'unchanged', 'refused', 'other_owners']) sum[name] += found[name];
    sum.problems.push(...found.problems);
  }
  return sum;
}

// jobs: the chosen jobs. matching: the filter of the whole list if all jobs that it matches are chosen, else null.
export function Chosen({ jobs, matching, clear, wake, children }) {
  const [action, setAction] = useState(null);
  const [message, setMessage] = useState(null);
  const live = jobs.filter((job) => !ENDED.has(job.state));
  const isAny = (states) => Boolean(matching) || jobs.some(states);
  const done = (sum) => {
    setAction(null);
    setMessage(sum.refused ? refusals(sum) : null);
    if (!sum.refused) clear();
    wake.current?.();
  };
  const button = (name, title, isOffered, className) => html`<button class=${className} onClick=${() => setAction(name)} disabled=${!isOffered}>${title}</button>`;
  return html`<div class="actions" role="region" aria-label="The chosen jobs">
    <strong>${matching ? 'All matching jobs' : plural(jobs.length, 'job')} chosen</strong>${children}
    <button onClick=${() => go(['compare'], { jobs: jobs.map(({ id }) => id).join(',') })} disabled=${Boolean(matching) || jobs.length < 2 || jobs.length > MOST_COMPARED}
      title="Two to twenty jobs">Compare</button>
    ${button('tag', 'Tag', true)}
    ${button('priority', 'Change priority', Boolean(matching) || live.length)}
    ${button('move', 'Move', isAny((job) => job.state === 'QUEUED'))}
    ${button('hold', 'Hold', isAny((job) => job.state === 'QUEUED' && !job.held_by))}
    ${button('release', 'Release', isAny((job) => job.held_by))}
    ${button('cancel', 'Cancel', Boolean(matching) || live.length, 'danger')}
    ${button('delete', 'Delete', isAny((job) => ENDED.has(job.state)), 'danger')}
    <button class="quiet" onClick=${clear}>Clear</button>
    ${message && html`<span role="alert" class="numeric">${message}</span>`}
    ${action && html`<${ActionDialog} action=${action} jobs=${jobs} matching=${matching} onClose=${() => setAction(null)} onDone=${done} />`}
  </div>`;
}

// The problems of all calls by code: the message of one job stands for all.
function refusals({ problems }) {
  const byCode = new Map();
  for (const { code, count, message } of problems) byCode.set(code, { message, count: count + (byCode.get(code)?.count ?? 0) });
  return [...byCode.values()].map(({ count, message }) => (count > 1 ? `${plural(count, 'job')}, for example: ${message}` : message)).join('; ');
}

function ActionDialog({ action, jobs, matching, onClose, onDone }) {
  const { title, does, keeps, note, isDanger } = ACTIONS[action];
  const [priority, setPriority] = useState(50);
  const [tags, setTags] = useState({ add: '', remove: '' });
  const [queue, setQueue] = useState('');
  const queues = useQueues();
  const [plan, setPlan] = useState(null);
  const [error, setError] = useState(null);
  const [isBusy, setIsBusy] = useState(false);
  const calls = matching ? [{ filter: matching }] : callsFor(jobs);
  const parameters = { priority: { priority }, move: { queue }, tag: { add_tags: words(tags.add), remove_tags: words(tags.remove) } }[action] ?? {};
  const isEmpty = (action === 'tag' && !parameters.add_tags.length && !parameters.remove_tags.length) || (action === 'move' && !queue);
  const key = JSON.stringify(parameters);
  useEffect(() => {
    setPlan(null);
    setError(null);
    if (isEmpty) return undefined;
    let isOld = false;
    const timer = setTimeout(() => run(calls, action, parameters, true).then((found) => { if (!isOld) setPlan(found); }, (raised) => { if (!isOld) setError(raised); }), plan || error ? DELAY_MS : 0);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [action, key]);
  const act = async () => {
    setIsBusy(true);
    try {
      // No more jobs than the dry run has shown.
      onDone(await run(matching ? [{ filter: matching, max: plan.changed + plan.unchanged + plan.refused }] : calls, action, parameters, false));
    } catch (raised) {
      setError(raised);
      setIsBusy(false);
    }
  };
  const count = plural(plan?.changed ?? jobs.length, 'job');
  return html`<${Dialog} title=${title(matching ? 'all matching jobs' : plural(jobs.length, 'job'))} onClose=${onClose}>
    ${!matching && html`<p>${jobs.slice(0, 8).map((job) => [nameOf(job), job.variant].filter(Boolean).join(' ')).join(', ')}${jobs.length > 8 ? ` and ${jobs.length - 8} more` : ''}. ${note}</p>`}
    ${action === 'priority' && html`<p><label>Priority, 0 to 100 <input type="number" min="0" max="100" value=${priority} onInput=${(event) => setPriority(Number(event.target.value))} /></label></p>`}
    ${action === 'move' && html`<p><label>Queue <select value=${queue} onChange=${(event) => setQueue(event.target.value)}><option value=""></option>
      ${queues.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label></p>`}
    ${action === 'tag' && html`<p><label>Add tags <input value=${tags.add} placeholder="good, reviewed" onInput=${(event) => setTags({ ...tags, add: event.target.value })} /></label></p>
      <p><label>Remove tags <input value=${tags.remove} onInput=${(event) => setTags({ ...tags, remove: event.target.value })} /></label></p>`}
    <${Failure} error=${error} />
    <p role="status" class="plan">${plan ? summary(plan) : isEmpty || error ? '' : 'Checking …'}</p>
    <p class="buttons"><button onClick=${onClose}>${keeps}</button>
      <button class=${isDanger ? 'danger' : 'primary'} disabled=${!plan?.changed || isBusy} onClick=${act}>${does(count)}</button></p><//>`;
}

// What the dry run found.
function summary(plan) {
  const parts = [`${plural(plan.changed, 'job')} would change`];
  if (plan.unchanged) parts.push(`${plural(plan.unchanged, 'job')} would stay as ${plan.unchanged === 1 ? 'it is' : 'they are'}`);
  if (plan.refused) parts.push(`refused: ${refusals(plan)}`);
  if (plan.other_owners) parts.push(`${plural(plan.other_owners, 'job')} of other users would not be changed`);
  return `${parts.join('; ')}.`;
}
