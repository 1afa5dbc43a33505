// Registered models: the list, and a model with its versions, aliases, lineage and card.

import { address, go, link } from '../lib/address.js';
import { get } from '../lib/api.js';
import { bytes, clock, exactly, plural, whole } from '../lib/format.js';
import { html, useEffect, useMemo, useState } from '../lib/html.js';
import { usePoll } from '../lib/live.js';
import { markdown } from '../lib/markdown.js';
import { withoutDefaults } from '../lib/schema.js';
import { useStore } from '../lib/stores.js';
import { Copy, Empty, Fact, Failure, Loading } from '../parts/common.js';
import { IN_TEXT, NamedJob, toJob } from '../parts/job_parts.js';
import { More, usePages } from '../parts/pages.js';
import { Aliases } from './models/aliases.js';

const EVERY_MS = 10000;
// The draft of the view that submits jobs.
const DRAFT = 'dray.draft';

const pathOf = (name) => `v1/models/${encodeURIComponent(name)}`;
const Time = ({ at }) => html`<span title=${exactly(at)}>${clock(at)}</span>`;
const Labels = ({ names }) => names.map((name) => html`<span key=${name} class="label">${name}</span> `);

export function ModelsPage({ path }) {
  return path[1] ? html`<${Model} key=${path[1]} name=${path[1]} />` : html`<${List} />`;
}

function List() {
  const { items, error, more } = usePages('v1/models');
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">Models</h1></header>
    <${Failure} error=${error} />
    ${!items ? !error && html`<${Loading} />` : items.length === 0
      ? html`<${Empty}>No models are registered. <code>dray model register JOB NAME</code> registers the result of a job.<//>`
      : html`<div class="card"><table><thead><tr><th>Name</th><th class="num">Latest</th><th>Aliases</th><th class="num">Versions</th><th>Owner</th><th>Created</th></tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.name}><td><a href=${link(['models', one.name])}>${one.name}</a></td><td class="num">${one.latest_version || '–'}</td>
        <td>${Object.entries(one.aliases).map(([alias, version]) => html`<span key=${alias} class="label">${alias} ${version}</span> `)}</td>
        <td class="num">${whole(one.num_versions)}</td><td>${one.owner}</td><td><${Time} at=${one.created_at} /></td></tr>`)}</tbody></table><${More} more=${more} /></div>`}</section>`;
}

function Model({ name }) {
  const { params } = useStore(address);
  const model = usePoll(pathOf(name), {}, EVERY_MS);
  const { items, error, more, refresh } = usePages(`${pathOf(name)}/versions`);
  const moves = usePages(`${pathOf(name)}/moves`);
  const refreshAll = () => { for (const one of [model, { refresh }, moves]) one.refresh(); };
  const chosen = Number(params.get('version')) || model.data?.latest_version;
  useEffect(() => { document.title = `${name} - dray`; }, [name]);
  if (!model.data) return html`<h1>${name}</h1>${model.error ? html`<${Failure} error=${model.error} />` : html`<${Loading} />`}`;
  const { data } = model;
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">${data.name}</h1>
      <span class="soft">${plural(data.num_versions, 'version')}, owner: ${data.owner}</span><a href=${link(['models'])}>All models</a></header>
    <${Failure} error=${model.error ?? error} />
    ${chosen ? html`<${Version} key=${chosen} name=${data.name} number=${chosen} model=${data} refresh=${refreshAll} />` : html`<${Empty}>All versions were deleted.<//>`}
    ${items?.length > 0 && html`<div class="card"><h2>Versions</h2><table><thead><tr><th class="num">Version</th><th>Aliases</th><th>Job</th><th>Of</th><th>Registered by</th><th>Registered</th></tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.version}><td class="num"><a href=${link(['models', data.name], { version: one.version })} aria-current=${one.version === chosen ? 'true' : undefined}>${one.version}</a></td>
        <td><${Labels} names=${one.aliases} /></td><td><${NamedJob} id=${one.job_id} /></td><td>${one.step === null ? 'result' : `step ${whole(one.step)}`}</td>
        <td>${one.created_by}</td><td><${Time} at=${one.created_at} /></td></tr>`)}</tbody></table><${More} more=${more} /></div>`}
    <${Moves} ...${moves} /></section>`;
}

// model: the model of the version, with its aliases. refresh: called after a change of the aliases.
function Version({ name, number, model, refresh }) {
  const { data, error } = usePoll(`${pathOf(name)}/versions/${number}`, {}, EVERY_MS);
  const [failed, setFailed] = useState(null);
  const [busy, setBusy] = useState(false);
  const card = useMemo(() => markdown(data?.card ?? ''), [data?.card]);
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const { lineage } = data;
  const use = async () => {
    setBusy(true);
    try {
      sessionStorage.setItem(DRAFT, await documentFrom(data));
      go(['submit']);
    } catch (raised) {
      setFailed(raised);
      setBusy(false);
    }
  };
  return html`<div class="card"><h2>Version ${data.version}</h2>
    <${Aliases} model=${model} version=${data.version} path=${`${pathOf(name)}/aliases`} refresh=${refresh} />
    <p class="buttons">${lineage.recipe && html`<button class="primary" disabled=${busy} onClick=${use}>Use this</button>`}<code>${data.reference}</code><${Copy} text=${data.reference} /></p>
    <${Failure} error=${failed ?? error} />
    <dl class="facts"><${Fact} name="Job"><a href=${toJob(data.job_id)} style=${IN_TEXT}>${lineage.job_name}</a>${data.step === null ? ', its result' : `, step ${whole(data.step)}`}<//>
      <${Fact} name="Owner of the job">${lineage.owner}<//>
      ${lineage.recipe && html`<${Fact} name="Recipe">${lineage.recipe}<//>`}
      ${lineage.base && html`<${Fact} name="Base">${lineage.base}<//>`}
      ${lineage.data.length > 0 && html`<${Fact} name="Data" title=${lineage.data_sha256 ?? undefined}>${lineage.data.join(', ')}<//>`}
      <${Fact} name="Hash of the document" title=${lineage.document_sha256}>${lineage.document_sha256.slice(0, 12)}<//></dl>
    ${lineage.parents.length > 0 && html`<h3>Started from</h3><ol>${lineage.parents.map((one) => html`<li key=${one.job_id}>${one.model ? html`<${ToVersion} reference=${one.model} /> (` : ''}${one.exists ? html`<${NamedJob} id=${one.job_id} style=${IN_TEXT} />` : `${one.job_id}, deleted`}${one.step === null ? '' : `, step ${whole(one.step)}`}${one.model ? ')' : ''}</li>`)}</ol>`}
    ${data.card && html`<h3>Card</h3><div class="notes" tabindex="0" role="region" aria-label="Card">${card}</div>`}
    <h3>Files</h3><table><thead><tr><th>Path</th><th class="num">Size</th><th>SHA-256</th></tr></thead>
      <tbody>${data.files.map((one) => html`<tr key=${one.path}><td><code>${one.path}</code>${one.missing && html` <strong>missing from the storage</strong>`}</td><td class="num">${bytes(one.size_bytes)}</td><td title=${one.sha256}><code>${one.sha256.slice(0, 12)}</code></td></tr>`)}</tbody></table>
    <p class="soft">Download all: <code>dray model download ${name}@${data.version} FOLDER</code></p></div>`;
}

function ToVersion({ reference }) {
  const [, name, version] = /^model:\/\/(.+)@(\d+)$/.exec(reference) ?? [null, reference, ''];
  return html`<a href=${link(['models', name], { version })} style=${IN_TEXT}>${name}@${version}</a>`;
}

function Moves({ items, error, more }) {
  if (!items?.length) return html`<${Failure} error=${error} />`;
  return html`<div class="card"><h2>Changes of aliases</h2><table><thead><tr><th>Alias</th><th class="num">From</th><th class="num">To</th><th>By</th><th>Time</th></tr></thead>
    <tbody>${items.map((one, at) => html`<tr key=${items.length - at}><td>${one.alias}</td><td class="num">${one.from_version ?? '–'}</td><td class="num">${one.to_version ?? '–'}</td><td>${one.moved_by}</td><td><${Time} at=${one.moved_at} /></td></tr>`)}</tbody></table><${More} more=${more} /></div>`;
}

// The document of a job like the version's job, which starts from the version.
async function documentFrom({ job_id: id, reference, step }) {
  const [job, root] = await Promise.all([get(`v1/jobs/${id}`), get('v1/schema')]);
  const { init_from: _, ...document } = withoutDefaults(job.spec, root);
  if (document.recipe !== 'fine_tuning' || step !== null) document.init_from = reference;
  else {
    const { registered, catalogue, ...model } = document.model;
    document.model = { ...model, base: reference };
  }
  return `${JSON.stringify(document, null, 2)}\n`;
}
