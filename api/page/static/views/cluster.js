// The cluster: its nodes, queues and waiting jobs now; its usage over time; and webhooks.

import { address, go, link } from '../lib/address.js';
import { ago, bytes, clock, duration, exactly, fixed, plural } from '../lib/format.js';
import { get } from '../lib/api.js';
import { html, useEffect, useState } from '../lib/html.js';
import { repeat, useNow, usePoll } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { Empty, Failure, Loading, Tabs } from '../parts/common.js';
import { IN_TEXT, Message, NamedJob, RayLink, State, gpuOf, nameOf, toJob } from '../parts/job_parts.js';
import { GPU_USES, SAMPLED_MS } from '../parts/uses.js';
import { amount } from './cluster/amounts.js';
import { Queues } from './cluster/queues.js';
import { Usage } from './cluster/usage.js';
import { Webhooks } from './cluster/webhooks.js';

const MOST_SLOTS = 64;
const WITH_SLOTS = ['STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING'];
const FORECASTS = 12;

const TABS = [['now', 'Now'], ['usage', 'Usage'], ['webhooks', 'Webhooks']];

export function ClusterPage() {
  const { params } = useStore(address);
  const tab = TABS.some(([name]) => name === params.get('tab')) ? params.get('tab') : 'now';
  return html`<section aria-labelledby="title"><h1 id="title">Cluster</h1>
    <${Tabs} tabs=${TABS} current=${tab} label="Parts of the cluster" onChoose=${(name) => go(['cluster'], { tab: name === 'now' ? '' : name })} />
    <div id="panel" role="tabpanel" aria-labelledby=${`tab-${tab}`}>${tab === 'usage' ? html`<${Usage} />` : tab === 'webhooks' ? html`<${Webhooks} />` : html`<${Now} />`}</div></section>`;
}

// Used slots, refused nodes with the reason, queues, and waiting jobs with their forecasts.
function Now() {
  const cluster = usePoll('v1/cluster', {}, 4000);
  const running = usePoll('v1/jobs', { state: WITH_SLOTS, brief: true, limit: 200 }, 4000);
  const now = useNow(5000);
  if (!cluster.data) return cluster.error ? html`<${Failure} error=${cluster.error} />` : html`<${Loading} />`;
  const { nodes, connected, reason, storage, updated_at: seen, ray_dashboard: dashboard, autoscaling } = cluster.data;
  const spread = new Set(nodes.flatMap((node, n) => node.jobs.filter((id) => nodes.some((other, m) => m !== n && other.jobs.includes(id)))));
  const jobs = Object.fromEntries((running.data?.items ?? []).map((job) => [job.id, job]));
  const totals = totalsOf(nodes);
  return html`<header class="head">
      <span class="soft">${plural(nodes.length, 'node')}${seen ? html`, seen <span title=${exactly(seen)}>${ago(seen, now)}</span>` : ''}</span>
      ${dashboard && html`<${RayLink} className="button" dashboard=${dashboard} place="cluster">Ray dashboard<//>`}</header>
    ${!connected && html`<div class="failure" role="alert"><strong>The service is not connected to the cluster.</strong> ${reason}</div>`}
    ${storage.problem && html`<div class="failure" role="alert"><strong>The storage does not accept data:</strong> ${storage.problem}</div>`}
    <dl class="facts card">${totals.map(({ name, held, total }) => html`<div key=${name} class="fact"><dt>${name} held</dt><dd>${amount(name, held)} of ${amount(name, total)}</dd></div>`)}
      ${storage.used_bytes !== null && html`<div class="fact"><dt>Storage</dt><dd>${bytes(storage.used_bytes)} of ${bytes(storage.quota_bytes)}</dd></div>`}
      ${autoscaling && html`<div class="fact"><dt>Requested nodes</dt><dd>${autoscaling.num_nodes}</dd></div>`}</dl>
    ${nodes.length === 0 && html`<${Empty}>There are no nodes.<//>`}
    <div class="nodes">${nodes.map((node) => html`<${Node} key=${node.node_id} node=${node} jobs=${jobs} spread=${spread} now=${now} dashboard=${dashboard} />`)}</div>
    <${Queues} />
    <h2>Waiting jobs</h2><${Waiting} now=${now} running=${running.data?.items ?? []} />`;
}

const useful = (name) => name === 'CPU' || name === 'GPU' || name === 'memory';

function totalsOf(nodes) {
  const found = new Map();
  for (const { resources, held, alive, accepted } of nodes) {
    if (!alive || !accepted) continue;
    for (const [name, total] of Object.entries(resources)) {
      if (!useful(name)) continue;
      const sum = found.get(name) ?? { name, total: 0, held: 0 };
      sum.total += total;
      sum.held += held[name] ?? 0;
      found.set(name, sum);
    }
  }
  return [...found.values()].filter(({ name, held }) => name !== 'memory' || held > 0);
}

function Node({ node, jobs, spread, now, dashboard }) {
  const { resources, held, quarantined } = node;
  const kind = resources.GPU ? 'GPU' : 'CPU';
  const count = Math.floor(resources[kind] ?? 0);
  const taken = Math.min(count, Math.ceil(held[kind] ?? 0));
  const stuck = Math.min(count - taken, quarantined.reduce((sum, { slots }) => sum + slots, 0));
  const out = !node.alive || !node.accepted;
  const model = gpuOf(node);
  const status = !node.alive ? 'lost' : out ? 'refused' : `${taken} of ${count} ${kind}`;
  return html`<section class=${`node ${out ? 'out' : ''}`} aria-label=${node.hostname}>
    <h2 class="minor"><${RayLink} dashboard=${dashboard} place=${`cluster/nodes/${node.node_id}`} title="This node in Ray's dashboard">${node.hostname}<//><span class="soft">${status}${model && `, ${model}`}</span></h2>
    ${!node.alive && html`<p class="note">Ray has lost this node. Jobs on it have lost their slots.</p>`}
    ${!out && count <= MOST_SLOTS && html`<div class="slots" role="img" aria-label=${`${taken} of ${count} ${kind} are held${stuck ? `, ${stuck} are in quarantine` : ''}`}>
      ${Array.from({ length: count }, (_, n) => html`<span key=${n} class=${`slot ${n < taken ? 'held' : n < taken + stuck ? 'stuck' : ''}`}></span>`)}</div>`}
    ${!out && Object.entries(resources).filter(([name]) => useful(name)).map(([name, total]) => html`<div key=${name} class="resource"><span class="soft">${name}</span>
      <span class="meter"><span style=${{ width: `${Math.min(100, (100 * (held[name] ?? 0)) / total)}%` }}></span></span><span class="num">${amount(name, held[name] ?? 0)} / ${amount(name, total)}</span></div>`)}
    ${node.reason && html`<p class="note">${node.reason}</p>`}
    ${quarantined.map((one) => html`<p key=${one.since + one.job_id} class="note">${plural(one.slots, 'slot')} in quarantine for ${duration((now - new Date(one.since)) / 1000)}: ${one.reason} (<${NamedJob} id=${one.job_id} style=${IN_TEXT} />)</p>`)}
    ${node.withheld.map((one) => html`<p key=${one.gpu + one.code} class="note">No new work since <span title=${exactly(one.since)}>${clock(one.since)}</span>: ${one.reason}</p>`)}
    ${node.check && html`<${Check} ...${node.check} />`}
    ${node.reservations.map((one) => html`<p key=${one.name} class="reserved">${one.maintenance ? 'Maintenance' : html`Reserved for ${whoseOf(one)}`}: <strong>${one.name}</strong>,${' '}
      ${new Date(one.begins_at) <= now ? 'until' : html`<span title=${exactly(one.begins_at)}>${clock(one.begins_at)}</span> to`} <span title=${exactly(one.ends_at)}>${clock(one.ends_at)}</span></p>`)}
    ${node.jobs.length > 0 && html`<p>${node.jobs.map((id) => html`<a key=${id} class="label" href=${toJob(id)}>${jobs[id] ? nameOf(jobs[id]) : id}</a> `)}</p>`}
    ${!out && kind === 'GPU' && node.jobs.length > 0 && html`<${Gpus} node=${node} jobs=${jobs} spread=${spread} />`}
    ${Object.keys(node.labels).length > 0 && html`<details><summary class="soft">labels</summary>${Object.entries(node.labels).map(([key, value]) => html`<div key=${key}><code>${key}=${value}</code></div>`)}</details>`}
  </section>`;
}

// A node's newest self-test, and its slow GPUs.
const Check = ({ state, why, message, devices }) => html`<p class="note">Self-test: ${state === 'done' ? message : `${state}, ${why}`}</p>
  ${devices.flatMap(({ index, slow }) => slow.map((one) => html`<p key=${index + one.measure} class="note">GPU ${index} is slow: ${one.measure} is ${fixed(one.factor, 1)} times worse than usual</p>`))}`;

// The users, queues and projects of a reservation: `ann, queue night`.
const whoseOf = ({ users, queues, projects }) => [...users, ...queues.map((name) => `queue ${name}`), ...projects.map((name) => `project ${name}`)].join(', ');

// Current usage of a node's GPUs, from the newest samples of its jobs.
function Gpus({ node, jobs, spread }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary class="soft">GPUs now</summary>
    ${open && html`<table class="uses"><thead><tr><th>Rank</th>${GPU_USES.map(([name]) => html`<th key=${name} class="num">${name}</th>`)}</tr></thead>
      ${node.jobs.map((id) => html`<${GpusOf} key=${id} id=${id} name=${jobs[id] ? nameOf(jobs[id]) : id} isSpread=${spread.has(id)} />`)}</table>`}</details>`;
}

function GpusOf({ id, name, isSpread }) {
  const sample = usePoll(isSpread ? null : `v1/jobs/${id}/metrics/system/newest`, {}, SAMPLED_MS).data;
  const note = isSpread ? 'runs on several nodes: see its ranks' : sample && !sample.ranks.length ? 'no samples yet' : '';
  return html`<tbody><tr><td colspan=${GPU_USES.length + 1}><a href=${toJob(id, 'ranks')}>${name}</a> <span class="soft">${note}</span></td></tr>
    ${sample?.ranks.map(({ rank, values }) => html`<tr key=${rank}><td>${rank}</td>${GPU_USES.map(([column, of]) => html`<td key=${column} class="num">${of(values) || '–'}</td>`)}</tr>`)}</tbody>`;
}

// The jobs that start next, with their explanations: {found, error}. The first jobs of the queue are found
// in the explanation of a job far back in the queue. Held jobs have no position.
function useWaiting() {
  const [state, setState] = useState({ found: null, error: null });
  useEffect(() => {
    const controller = new AbortController();
    repeat(async (signal) => {
      const { items } = await get('v1/jobs', { state: 'QUEUED', brief: true, limit: 30 }, signal);
      if (!items.length) {
        setState({ found: { jobs: [], count: 0 }, error: null });
        return;
      }
      const last = items.reduce((a, b) => ((b.position ?? 0) > (a.position ?? 0) ? b : a));
      const ofLast = await get(`v1/jobs/${last.id}/explain`, {}, signal);
      const jobs = [];
      for (const job of [...ofLast.ahead, last].slice(0, FORECASTS)) {
        const explanation = job.id === last.id ? ofLast : await get(`v1/jobs/${job.id}/explain`, {}, signal);
        if (explanation.state === 'QUEUED') jobs.push({ job, explanation });
      }
      if (!signal.aborted) setState({ found: { jobs, count: ofLast.queue_length ?? jobs.length }, error: null });
    }, { every: 8000, signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, []);
  return state;
}

function Waiting({ now, running }) {
  const { found, error } = useWaiting();
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  if (!found.jobs.length) return html`<${Empty}>No jobs are waiting.<//>`;
  const starts = found.jobs.map(({ explanation }) => explanation.start?.at).filter(Boolean).map((at) => new Date(at).getTime());
  const runs = running.map((job) => ({ job, end: new Date(job.progress?.latest_end_at ?? 0).getTime() })).filter(({ end }) => end > now).sort((a, b) => a.end - b.end).slice(0, FORECASTS);
  const until = Math.max(now + 60000, ...starts, ...runs.map(({ end }) => end)) * 1;
  const span = (until - now) * 1.15;
  const part = (time) => `${Math.max(0, Math.min(100, (100 * (time - now)) / span))}%`;
  return html`<div class="card"><p class="soft">From now to ${clock(now + span)}: solid bars for running jobs, dashed bars for waiting jobs.</p>
    <div class="forecast">
      ${runs.map(({ job, end }) => html`<div key=${job.id} class="name"><a href=${toJob(job.id)}>${nameOf(job)}</a></div>
        <div class="track" title=${`ends between ${exactly(job.progress.earliest_end_at)} and ${exactly(end)}`}><span class="span runs" style=${{ left: 0, width: part(end) }}></span><span class="when" style=${{ left: part(end) }}>${duration((end - now) / 1000)}</span></div>`)}
      ${found.jobs.map(({ job, explanation }) => {
        const at = explanation.start?.at && new Date(explanation.start.at).getTime();
        return html`<div key=${job.id} class="name"><a href=${toJob(job.id)} title=${job.id}>${nameOf(job)}</a></div>
          <div class="track" title=${explanation.reason.message}>${at
            ? html`<span class="span waits" style=${{ left: 0, width: part(at) }} hidden=${at <= now}></span><span class="when" style=${{ left: part(at) }}>${at > now ? duration((at - now) / 1000) : 'now'}</span>`
            : html`<span class="when soft"><${Message} text=${explanation.start?.reason?.message ?? explanation.reason.message} /></span>`}</div>`;
      })}</div>
    <table><thead><tr><th class="num">Position</th><th>Job</th><th>State</th><th class="num">Workers</th><th class="num">Priority</th><th>Why it waits</th></tr></thead><tbody>
      ${found.jobs.map(({ job, explanation }) => html`<tr key=${job.id}><td class="num">${explanation.position ?? '–'}</td><td><a href=${toJob(job.id)}>${nameOf(job)}</a></td>
        <td><${State} job=${{ ...job, reason: explanation.reason }} /></td><td class="num">${job.world_size}</td><td class="num">${job.priority}</td><td class="sentence"><${Message} text=${explanation.reason.message} /></td></tr>`)}</tbody></table>
    ${found.count > found.jobs.length && html`<p><a href=${link(['jobs'], { state: 'QUEUED' })}>All ${plural(found.count, 'waiting job')}</a></p>`}</div>`;
}
