// The list of jobs, which updates itself.

import { address, adjust, go, link } from '../lib/address.js';
import { change, hasToken } from '../lib/api.js';
import { ago, exactly, plural } from '../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../lib/html.js';
import { JobList } from '../lib/job_list.js';
import { repeat, useNow, usePoll } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { Dialog, Empty, Failure, Loading } from '../parts/common.js';
import { ENDED, JobLink, Labels, Progress, STATES, State, Tags, costOf, goodputOf, lossOf, nameOf } from '../parts/job_parts.js';
import { useMedia, useVirtual } from '../parts/virtual.js';

const EVERY_MS = 4000;
const GROUPS = [
  ['all', 'All', []],
  ['waiting', 'Waiting', ['QUEUED']],
  ['running', 'Running', ['STARTING', 'RUNNING', 'RECOVERING', 'CANCELLING']],
  ['ended', 'Ended', ['SUCCEEDED', 'FAILED', 'CANCELLED']],
  ['failed', 'Failed', ['FAILED']],
];

// The API query for the parameters of an address.
function queryOf(params) {
  const text = (params.get('text') || '').trim();
  const query = { state: params.getAll('state'), queue: params.get('queue'), label: params.getAll('label'), where: params.get('where') };
  if (params.get('mine')) query.owner = '@me';
  if (/^job-[0-9a-z]*$/.test(text)) query.id_prefix = text;
  else if (/^array-[0-9a-z]*$/.test(text)) query.array = text;
  else if (text) query.text = text;
  return query;
}

export function Jobs() {
  const { params } = useStore(address);
  const query = queryOf(params);
  const key = JSON.stringify(query);
  const list = useMemo(() => new JobList(query), [key]);
  useStore(list.loaded);
  const [error, setError] = useState(null);
  const [chosen, setChosen] = useState(new Set());
  const body = useRef(null);
  const isNarrow = useMedia('(max-width: 46rem)');
  const rowHeight = isNarrow ? 76 : 38;
  const { first, last, above, below } = useVirtual(body, list.jobs.length, rowHeight, true);
  const inView = useRef([0, 0]);
  inView.current = [first, Math.max(first, last - 1)];
  const wake = useRef(null);
  const now = useNow(5000);

  useEffect(() => {
    const controller = new AbortController();
    setError(null);
    repeat(async (signal) => {
      try {
        await list.refresh(...inView.current, signal);
      } catch (raised) {
        // An expression with a syntax error is not sent again.
        if (raised.code !== 'invalid_search') throw raised;
        setError(raised);
        return true;
      }
      return false;
    }, {
      every: EVERY_MS, signal: controller.signal, onError: setError, wake,
    });
    return () => controller.abort();
  }, [list]);
  useEffect(() => {
    if (list.next && last >= list.jobs.length - 30) list.more().catch(setError);
  }, [list, last, list.jobs.length]);
  useEffect(() => setChosen(new Set()), [key]);

  const toggle = (id) => setChosen((was) => {
    const next = new Set(was);
    if (!next.delete(id)) next.add(id);
    return next;
  });
  const rows = list.jobs.slice(first, last);
  const isUnreadable = error?.code === 'invalid_search';
  const allChosen = list.jobs.length > 0 && chosen.size === list.jobs.length;

  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">Jobs</h1>
      <span class="soft" role="status">${list.loaded.value && `${plural(list.jobs.length, 'job')}${list.next ? ' so far' : ''}`}</span>
      <a class="button primary" href=${link(['submit'])}>Submit a job</a></header>
    <${Filters} params=${params} />
    <${Search} where=${params.get('where') ?? ''} error=${isUnreadable ? error : null} />
    <${Failure} error=${isUnreadable ? null : error} />
    ${!list.loaded.value && !error && html`<${Loading} />`}
    ${list.loaded.value && list.jobs.length === 0 && html`<${Empty}>
      ${[...params.keys()].length ? 'No matching jobs.' : html`There are no jobs yet. <a href=${link(['submit'])}>Submit the first one</a>.`}<//>`}
    ${list.jobs.length > 0 && html`<table class="jobs" aria-rowcount=${list.next ? -1 : list.jobs.length + 1}>
      <thead><tr>
        <th class="pick"><input type="checkbox" aria-label="Choose all loaded jobs" checked=${allChosen}
          onChange=${() => setChosen(allChosen ? new Set() : new Set(list.jobs.map((job) => job.id)))} /></th>
        <th>Name</th><th>State</th><th class="wide">Progress</th><th class="num">Loss</th><th>Queue</th>
        <th class="who">Owner</th><th class="num" title="Workers: the world size">Workers</th>
        <th class="num" title="The share of its slots' time that was useful">Goodput</th><th class="num cost">Cost</th><th class="num">Submitted</th>
      </tr></thead>
      <tbody ref=${body}>
        ${above > 0 && html`<tr key="above" class="spacer" aria-hidden="true" style=${{ height: `${above}px` }}></tr>`}
        ${rows.map((job, index) => html`<tr key=${job.id} aria-rowindex=${first + index + 2} class=${chosen.has(job.id) ? 'chosen' : ''}>
          <td class="pick"><input type="checkbox" aria-label=${`Choose ${nameOf(job)}`} checked=${chosen.has(job.id)} onChange=${() => toggle(job.id)} /></td>
          <td class="name"><${JobLink} job=${job} /> <${Tags} tags=${job.tags} /> <${Labels} labels=${job.labels} /></td>
          <td class="is"><${State} job=${job} /></td>
          <td class="wide"><${Progress} job=${job} /></td>
          <td class="num loss">${lossOf(job)}</td>
          <td class="queue">${job.queue}</td>
          <td class="who">${job.owner}</td>
          <td class="num size">${job.world_size}</td>
          <td class="num good">${goodputOf(job)}</td>
          <td class="num cost">${costOf(job) ?? '–'}</td>
          <td class="num when" title=${exactly(job.created_at)}>${ago(job.created_at, now)}</td>
        </tr>`)}
        ${below > 0 && html`<tr key="below" class="spacer" aria-hidden="true" style=${{ height: `${below}px` }}></tr>`}
      </tbody></table>`}
    ${chosen.size > 0 && html`<${Chosen} list=${list} chosen=${chosen} clear=${() => setChosen(new Set())} wake=${wake} />`}
  </section>`;
}

function Filters({ params }) {
  const queues = usePoll('v1/queues', {}, 30000).data?.items ?? [];
  const states = params.getAll('state');
  const [text, setText] = useState(params.get('text') || '');
  const [label, setLabel] = useState('');
  const typing = useRef(null);
  useEffect(() => setText(params.get('text') || ''), [params.get('text')]);
  const type = (value) => {
    setText(value);
    clearTimeout(typing.current);
    typing.current = setTimeout(() => adjust({ text: value.trim() }), 250);
  };
  const same = (group) => group.length === states.length && group.every((state) => states.includes(state));
  const labels = params.getAll('label');
  const addLabel = (event) => {
    event.preventDefault();
    if (!/^[^=]+=/.test(label)) return;
    adjust({ label: [...new Set([...labels, label])] });
    setLabel('');
  };
  return html`<div class="filters" role="search">
    <div class="segments" role="group" aria-label="States">
      ${GROUPS.map(([name, title, group]) => html`<button key=${name} aria-pressed=${same(group)} onClick=${() => adjust({ state: group })}>${title}</button>`)}
    </div>
    <select aria-label="State" value=${states.length === 1 ? states[0] : ''} onChange=${(event) => adjust({ state: event.target.value })}>
      <option value="">any state</option>${STATES.map((state) => html`<option key=${state} value=${state}>${state}</option>`)}</select>
    <select aria-label="Queue" value=${params.get('queue') || ''} onChange=${(event) => adjust({ queue: event.target.value })}>
      <option value="">any queue</option>${queues.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
    <input type="search" placeholder="name or id" aria-label="Name or id" value=${text} onInput=${(event) => type(event.target.value)} />
    <form onSubmit=${addLabel}><input placeholder="label=value" aria-label="Label, as key=value; Enter adds it" value=${label}
      pattern="[^=]+=.*" onInput=${(event) => setLabel(event.target.value)} /></form>
    ${labels.map((one) => html`<button key=${one} class="label" aria-label=${`Remove the label ${one}`}
      onClick=${() => adjust({ label: labels.filter((other) => other !== one) })}>${one} ×</button>`)}
    ${hasToken.value && html`<label><input type="checkbox" checked=${Boolean(params.get('mine'))}
      onChange=${(event) => adjust({ mine: event.target.checked ? '1' : '' })} /> mine</label>`}
  </div>`;
}

// The search expression, and its error below the column that the server names.
function Search({ where, error }) {
  const [text, setText] = useState(where);
  const field = useRef(null);
  useEffect(() => setText(where), [where]);
  const [, column, message] = error?.message.match(/^column (\d+): ([^]*)$/) ?? [null, null, error?.message];
  // The server counts characters; JavaScript counts UTF-16 code units.
  const before = column ? [...where].slice(0, column - 1).join('') : where;
  useEffect(() => {
    if (error && document.activeElement === field.current) field.current.setSelectionRange(before.length, before.length);
  }, [error]);
  const search = (event) => {
    event.preventDefault();
    adjust({ where: text.trim() });
  };
  return html`<form class="where" role="search" aria-label="Search by an expression" onSubmit=${search}>
    <input type="search" ref=${field} maxlength="4000" spellcheck="false" autocomplete="off" aria-label="Expression; Enter searches" placeholder="val/accuracy > 0.9 and train.optimizer.lr < 0.01 and 'good' in tags"
      value=${text} aria-invalid=${Boolean(error)} aria-describedby=${error ? 'where-error' : null} onInput=${(event) => setText(event.target.value)} />
    <button>Search</button>
    ${where && html`<button type="button" class="quiet" onClick=${() => adjust({ where: '' })}>Clear</button>`}
    ${error && html`<pre id="where-error" role="alert">${`${where}\n`}<span aria-hidden="true"><span class="before">${before}</span>^ </span><strong>${message}</strong>${column && html`<span class="hidden"> at column ${column}</span>`}${error.hint && `\n${error.hint}`}</pre>`}
  </form>`;
}

// Actions on the chosen jobs.
function Chosen({ list, chosen, clear, wake }) {
  const [asking, setAsking] = useState(null);
  const [priority, setPriority] = useState(50);
  const [message, setMessage] = useState(null);
  const jobs = list.jobs.filter((job) => chosen.has(job.id));
  const live = jobs.filter((job) => !ENDED.has(job.state));
  const each = async (doing) => {
    setMessage('…');
    const refused = [];
    for (const job of live) {
      try {
        list.replace(await doing(job));
      } catch (error) {
        refused.push(`${nameOf(job)}: ${error.message}`);
      }
    }
    setMessage(refused.length ? refused.join('; ') : null);
    setAsking(null);
    if (!refused.length) clear();
    wake.current?.();
  };
  return html`<div class="actions" role="region" aria-label="The chosen jobs">
    <strong>${plural(chosen.size, 'job')} chosen</strong>
    <button onClick=${() => go(['compare'], { jobs: [...chosen].join(',') })} disabled=${chosen.size < 2 || chosen.size > 20}
      title="Two to twenty jobs">Compare</button>
    <button onClick=${() => setAsking('priority')} disabled=${!live.length}>Change priority</button>
    <button class="danger" onClick=${() => setAsking('cancel')} disabled=${!live.length}>Cancel</button>
    <button class="quiet" onClick=${clear}>Clear</button>
    ${message && html`<span role="alert" class="numeric">${message}</span>`}
    ${asking === 'cancel' && html`<${Dialog} title=${`Cancel ${plural(live.length, 'job')}?`} onClose=${() => setAsking(null)}>
      <p>${live.slice(0, 8).map(nameOf).join(', ')}${live.length > 8 ? ` and ${live.length - 8} more` : ''}. Their metrics, logs and checkpoints are kept.</p>
      <p class="buttons"><button onClick=${() => setAsking(null)}>Keep them</button>
        <button class="danger" onClick=${() => each((job) => change('POST', `v1/jobs/${job.id}/cancel`))}>Cancel them</button></p><//>`}
    ${asking === 'priority' && html`<${Dialog} title="Change priority" onClose=${() => setAsking(null)}>
      <p><label>Priority, 0 to 100 <input type="number" min="0" max="100" value=${priority} onInput=${(event) => setPriority(Number(event.target.value))} /></label></p>
      <p class="buttons"><button onClick=${() => setAsking(null)}>Close</button>
        <button class="primary" onClick=${() => each((job) => change('PATCH', `v1/jobs/${job.id}`, { priority }))}>Change ${plural(live.length, 'job')}</button></p><//>`}
  </div>`;
}
