// The page of one job: its facts, the reason for its state, and tabs for the rest.

import { address, adjust, go, link } from '../lib/address.js';
import { change, followEvents } from '../lib/api.js';
import { bytes, clock, duration, exactly, money, number, percent, plural, range, seconds, until } from '../lib/format.js';
import { html, useEffect, useRef, useState } from '../lib/html.js';
import { pace, useNow, usePoll, useWhileLooked } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { topologyOf } from '../lib/topology.js';
import { useMedia } from '../parts/virtual.js';
import { Bar, Copy, Dialog, Fact, Failure, Loading, Tabs } from '../parts/common.js';
import { ENDED, JobLink, Labels, Message, Progress, RayLink, State, Tags, Variant, WITH_SLOTS, costOf, goodputOf, lossOf, nameOf } from '../parts/job_parts.js';
import { Annotations } from './job/annotations.js';
import { Clients } from './job/clients.js';
import { Curves } from './job/curves.js';
import { Document } from './job/document.js';
import { FailureLine } from './job/failure_line.js';
import { Files } from './job/files.js';
import { Lineage } from './job/lineage.js';
import { Logs } from './job/logs.js';
import { Media } from './job/media.js';
import { Ranks } from './job/ranks.js';
import { Samples } from './job/samples.js';
import { EventList, Timeline, changedAt } from './job/timeline.js';

const TABS = [['curves', 'Curves'], ['logs', 'Logs'], ['ranks', 'Ranks'], ['samples', 'Samples'], ['media', 'Media'], ['clients', 'Clients'], ['files', 'Files'], ['events', 'Events'], ['document', 'Document'], ['lineage', 'Lineage']];
const JOB_MS = 3000;
// Period for data that changes only with events; an event reloads it at once.
const SELDOM_MS = 60000;
// Period for the explanation of a running job: between events, only the remaining time changes.
const RUNNING_MS = 30000;
// How long a script runs before the page shows how it reports metrics.
const UNMEASURED_MS = 60000;
const CLASSES = {
  useful: 'training', spare: 'ready as a spare', recomputed: 'repeated steps', starting: 'starting', data_wait: 'waiting for data',
  recovering: 'recovering', checkpointing: 'checkpoints', idle: 'idle', unreported: 'not reported',
};

export function JobPage({ path: [, jobId] }) {
  const { params } = useStore(address);
  const { events, error } = useEvents(jobId, () => {
    for (const one of [job, explanation, attempts, checkpoints]) one.refresh();
  });
  const job = usePoll(`v1/jobs/${jobId}`, {}, (found) => pace(changedAt(found, events), JOB_MS));
  const explanation = usePoll(`v1/jobs/${jobId}/explain`, {}, job.data?.state === 'RUNNING' ? RUNNING_MS : 10000);
  const attempts = usePoll(`v1/jobs/${jobId}/attempts`, {}, SELDOM_MS);
  const checkpoints = usePoll(`v1/jobs/${jobId}/checkpoints`, {}, 30000);
  const found = job.data;
  const tabs = TABS.filter(([name]) => (name !== 'clients' || found?.spec.federated?.http) && (name !== 'samples' || found?.spec.samples) && (name !== 'media' || found?.spec.script));
  const isTall = useMedia('(min-width: 64rem) and (min-height: 60rem)');
  const tab = tabs.some(([name]) => name === params.get('tab')) ? params.get('tab') : 'curves';
  useEffect(() => {
    if (found) document.title = `${[nameOf(found), found.variant].filter(Boolean).join(' ')} - dray`;
    return () => { document.title = 'dray'; };
  }, [found?.name]);

  if (!found) return job.error ? html`<${Failure} error=${job.error} />` : html`<${Loading} />`;
  const shared = { job: found, events, attempts: attempts.data?.items ?? [], checkpoints: checkpoints.data?.items ?? [] };
  // Only the first tab has room for the facts; a reader opens the rest.
  const isFirst = tab === 'curves';
  const isOpen = params.has('more') ? params.get('more') === '1' : isFirst && isTall;
  return html`<article aria-labelledby="title">
    <div class=${`summary ${isOpen ? 'open' : isFirst ? '' : 'closed'}`}>
      <header class="head"><h1 id="title" title=${nameOf(found)}>${nameOf(found)}</h1><${Variant} job=${found} /><${State} job=${found} /><span class="marks"><${Tags} tags=${found.tags} /><${Labels} labels=${found.labels} /></span>
        <${Actions} job=${found} refresh=${job.refresh} /></header>
      <${Failure} error=${error ?? (job.error?.status ? job.error : null)} />
      <${Why} job=${found} explanation=${explanation.data} events=${events} />
      ${isFirst && !isOpen && html`<${Facts} job=${found} isShort />`}
      <button class="quiet more" aria-expanded=${isOpen} aria-controls="details" onClick=${() => adjust({ more: isOpen ? '0' : '1' })}>${isOpen ? 'Less' : `Timeline, tags, notes and all facts${found.warnings.length ? `; ${plural(found.warnings.length, 'warning')}` : ''}`}</button>
    </div>
    <div id="details" hidden=${!isOpen}>${isOpen && html`
      <${Outlook} job=${found} explanation=${explanation.data} />
      <${Annotations} jobId=${jobId} />
      <div class="card"><${Facts} job=${found} /><${Goodput} job=${found} /><${Timeline} ...${shared} /></div>`}</div>
    <${Tabs} tabs=${tabs} current=${tab} label="Parts of the job" onChoose=${(name) => adjust({ tab: name === 'curves' ? '' : name })} />
    <div id="panel" role="tabpanel" aria-labelledby=${`tab-${tab}`}>
      ${isFirst && html`<${Unmeasured} job=${found} />`}
      ${isFirst && html`<${Curves} ...${shared} />`}
      ${tab === 'logs' && html`<${Logs} ...${shared} />`}
      ${tab === 'ranks' && html`<${Ranks} ...${shared} />`}
      ${tab === 'samples' && html`<${Samples} job=${found} />`}
      ${tab === 'media' && html`<${Media} job=${found} />`}
      ${tab === 'clients' && html`<${Clients} job=${found} />`}
      ${tab === 'files' && html`<${Files} job=${found} checkpoints=${checkpoints} />`}
      ${tab === 'events' && html`<${EventList} events=${events} />`}
      ${tab === 'document' && html`<${Document} job=${found} />`}
      ${tab === 'lineage' && html`<${Lineage} job=${found} />`}
    </div>
  </article>`;
}

// The events so far, from the event stream. `onNews` is called when new events have arrived.
function useEvents(jobId, onNews) {
  const [state, setState] = useState({ events: [], error: null });
  const all = useRef([]);
  const news = useRef(onNews);
  news.current = onNews;
  useWhileLooked((signal) => {
    let due = null;
    const show = () => {
      due = null;
      setState({ events: [...all.current], error: null });
      news.current();
    };
    followEvents(jobId, all.current.at(-1)?.seq ?? 0, (event) => {
      all.current.push(event);
      due ??= setTimeout(show, 50);
    }, signal).catch((error) => setState((was) => ({ ...was, error })));
  }, [jobId]);
  return state;
}

function Actions({ job, refresh }) {
  const [asking, setAsking] = useState(null);
  const [error, setError] = useState(null);
  const act = async (method, path, body) => {
    setAsking(null);
    setError(null);
    try {
      await change(method, path, body);
      refresh();
    } catch (raised) {
      setError(raised);
    }
  };
  const remove = async () => {
    try {
      await change('DELETE', `v1/jobs/${job.id}`);
      go(['jobs']);
    } catch (raised) {
      setAsking(null);
      setError(raised);
    }
  };
  const isSweep = usePoll(job.array_id && `v1/arrays/${job.array_id}`, {}, 0).data?.is_sweep;
  const ended = ENDED.has(job.state);
  const waits = job.state === 'QUEUED';
  return html`<span class="buttons">
    ${job.links.ray_dashboard && html`<${RayLink} className="button" dashboard=${job.links.ray_dashboard} place="actors" title=${`Its actors are called dray:${job.id}:…`}>Ray dashboard<//>`}
    ${isSweep && html`<a class="button" href=${link(['compare'], { sweep: job.array_id })}>The sweep</a>`}
    <a class="button" href=${link(['submit'], { from: job.id })}>Edit and resubmit</a>
    ${waits && html`<button onClick=${() => act('PATCH', `v1/jobs/${job.id}`, { held: !job.held_by })}>${job.held_by ? 'Release' : 'Hold'}</button>`}
    ${!ended && job.state !== 'CANCELLING' && html`<button class="danger" onClick=${() => setAsking('cancel')}>Cancel</button>`}
    ${ended && html`<button class="danger" onClick=${() => setAsking('delete')}>Delete</button>`}
    ${error && html`<${Dialog} title="That did not work" onClose=${() => setError(null)}><${Failure} error=${error} /><p class="buttons"><button onClick=${() => setError(null)}>Close</button></p><//>`}
    ${asking === 'cancel' && html`<${Dialog} title=${`Cancel ${nameOf(job)}?`} onClose=${() => setAsking(null)}>
      <p>The job will stop. Its metrics, logs and checkpoints are kept.</p>
      <p class="buttons"><button onClick=${() => setAsking(null)}>Keep it</button><button class="danger" onClick=${() => act('POST', `v1/jobs/${job.id}/cancel`)}>Cancel it</button></p><//>`}
    ${asking === 'delete' && html`<${Dialog} title=${`Delete ${nameOf(job)}?`} onClose=${() => setAsking(null)}>
      <p>Its logs, checkpoints and artifacts will be deleted too. This can't be undone.</p>
      <p class="buttons"><button onClick=${() => setAsking(null)}>Keep it</button><button class="danger" onClick=${remove}>Delete it</button></p><//>`}
  </span>`;
}

// How a script reports metrics, if it has run for a while without any.
function Unmeasured({ job }) {
  const now = useNow(5000);
  const began = job.started_at && (job.finished_at ? new Date(job.finished_at) : now) - new Date(job.started_at);
  if (!job.spec.script || Object.keys(job.summary).length > 0 || !began || (!job.finished_at && began < UNMEASURED_MS)) return null;
  return html`<p class="card">This script has reported no metrics. To report them, call <code>${"dray.train.report(step, {'train/loss': loss})"}</code> in the script, or write
    TensorBoard files or a <code>metrics.csv</code> in its folder. <a href="manual/guides/scripts-metrics.html" target="_blank" rel="noopener">Metrics of scripts</a></p>`;
}

// The reason for the state of the job, and its expected start and end.
function Why({ job, explanation, events }) {
  const now = useNow(5000);
  const current = explanation?.state === job.state ? explanation : null;
  const start = current?.start;
  const message = (current?.reason ?? job.reason).message;
  return html`<div class=${`why ${job.state === 'FAILED' ? 'bad' : ''}`}>
    <p class="reason" title=${message}><${Message} text=${message} /></p>
    <${FailureLine} job=${job} events=${events} />
    <p>${job.held_by && html`<span>Held by ${job.held_by}. </span>`}
      ${current?.position && html`<span>It is number ${number(current.position)} of ${plural(current.queue_length, 'waiting job')}. </span>`}
      ${start?.at && html`<span>It is expected to start <strong title=${exactly(start.at)}>${range(start, now)}</strong>${
        start.num_assumed ? `, if ${plural(start.num_assumed, 'job')} of unknown length take as long as recent jobs did` : ''}.</span>`}
      ${start && !start.at && start.reason && html`<span>Its start can't be predicted: ${start.reason.message}.</span>`}</p>
    ${current?.end?.at && html`<p>It is expected to end <strong title=${`${exactly(current.end.earliest_at)} to ${exactly(current.end.latest_at)}`}>${range(current.end, now)}</strong>.</p>`}
  </div>`;
}

// What would change the expected start, the jobs ahead, and all warnings.
function Outlook({ job, explanation }) {
  const now = useNow(5000);
  const current = explanation?.state === job.state ? explanation : null;
  if (!job.warnings.length && ![current?.counterfactuals, current?.ahead, current?.blocked_by, current?.favoured].some((one) => one?.length)) return null;
  return html`<div class="why">
    ${current?.counterfactuals.map((one) => html`<p key=${one.message}>Instead: ${one.message}${new Date(one.at ?? 0) > now ? ` (${until(one.at, now)}, about ${clock(one.at)})` : ''}.</p>`)}
    ${current && (current.ahead.length > 0 || current.blocked_by.length > 0) && html`<details><summary>${current.blocked_by.length ? `Waits for ${plural(current.blocked_by.length, 'job')}` : 'Jobs ahead of it'}</summary>
      <p>${[...current.running.filter(({ id }) => current.blocked_by.includes(id)), ...current.ahead].map((other) => html`<span key=${other.id}><${JobLink} job=${other} /> <span class="soft">${other.state}, ${plural(other.world_size, 'worker')}</span><br /></span>`)}</p></details>`}
    ${current?.favoured.map((one) => html`<p key=${one.code}>${one.message}</p>`)}
    ${job.warnings.map((one) => html`<p key=${one.code + one.message}>Warning: <${Message} text=${one.message} /></p>`)}
  </div>`;
}

function Facts({ job, isShort }) {
  const now = useNow(2000);
  const end = job.finished_at ? new Date(job.finished_at) : now;
  return html`<dl class=${isShort ? 'facts short' : 'facts'}>
    <${Fact} name="Progress"><${Progress} job=${job} isPlain /><//>
    <${Fact} name="Loss">${lossOf(job)}<//>
    <${Fact} name="Workers">${job.world_size}<//>
    ${job.spares > 0 && html`<${Fact} name="Spares">${WITH_SLOTS.has(job.state) ? `${job.spares_ready} of ${job.spares} ready` : job.spares}<//>`}
    ${job.memory_copies && html`<${Fact} name="Copy in memory" title=${`${bytes(job.memory_copies.worker_bytes)} on a worker`}>step ${job.memory_copies.step}, ${bytes(job.memory_copies.state_bytes)}<//>`}
    ${topologyOf(job.spec) && html`<${Fact} name="Topology">${topologyOf(job.spec)}<//>`}
    <${Fact} name="Queue">${job.queue}, priority ${job.priority}<//>
    <${Fact} name="Owner">${job.owner}<//>
    <${Fact} name="Submitted" title=${exactly(job.created_at)}>${clock(job.created_at)}<//>
    ${job.started_at && html`<${Fact} name="Waited">${duration(seconds(job.created_at, job.started_at))}<//>`}
    ${job.started_at && html`<${Fact} name=${job.finished_at ? 'Took' : 'Since start'} title=${exactly(job.started_at)}>${duration((end - new Date(job.started_at)) / 1000)}<//>`}
    ${job.progress?.samples_per_s && WITH_SLOTS.has(job.state) ? html`<${Fact} name="Samples/s">${number(job.progress.samples_per_s)}<//>` : null}
    <${Fact} name="Attempts">${job.attempt}<//>
    ${job.recoveries > 0 && html`<${Fact} name="Recovered in place">${plural(job.recoveries, 'time')}<//>`}
    <${Fact} name="Goodput">${goodputOf(job)}<//>
    ${job.cost && html`<${Fact} name="Cost" title=${`useful ${money(job.cost.useful, job.cost.currency)}, wasted ${money(job.cost.wasted, job.cost.currency)}`}>${costOf(job)}<//>`}
    <${Fact} name="Id"><code>${job.id}</code> <${Copy} text=${job.id} /><//>
  </dl>`;
}

function Goodput({ job }) {
  if (!job.goodput?.total) return null;
  const parts = Object.entries(job.goodput.slot_seconds).map(([name, value]) => ({
    name, value, title: `${CLASSES[name] ?? name}: ${duration(value)} of slots, ${percent(value / job.goodput.total)}`,
  }));
  return html`<div class="goodput"><h2 class="minor">Where the time went</h2>
    <${Bar} parts=${parts} label=${`Goodput: ${parts.filter(({ value }) => value > 0).map(({ title }) => title).join('; ')}`} />
    <ul class="legend">${parts.filter(({ value }) => value > 0).map(({ name, value }) => html`<li key=${name}><span class=${`share share-${name}`}></span>${CLASSES[name] ?? name}
      <span class="soft"> ${percent(value / job.goodput.total)}</span></li>`)}</ul></div>`;
}
