// The stored files of a job: checkpoints and artifacts to download, and pictures.

import { download, send, urlOf } from '../../lib/api.js';
import { staysSignedIn } from '../../lib/credentials.js';
import { bytes, clock, exactly, number } from '../../lib/format.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Copy, Failure, Loading } from '../../parts/common.js';
import { ENDED } from '../../parts/job_parts.js';

const PICTURE = /\.(png|jpe?g|webp|gif)$/i;
const TYPES = { png: 'image/png', jpg: 'image/jpeg', jpeg: 'image/jpeg', webp: 'image/webp', gif: 'image/gif' };
const MAX_PICTURES = 24;
const MAX_PICTURE_BYTES = 4 << 20;

// checkpoints: {data, error} of their poll.
export function Files({ job, checkpoints }) {
  const artifacts = usePoll(`v1/jobs/${job.id}/artifacts`, {}, ENDED.has(job.state) ? 0 : 8000);
  const [error, setError] = useState(null);
  const items = artifacts.data?.items ?? [];
  const saved = checkpoints.data?.items ?? [];
  const save = (wanted) => download(job.id, wanted).then(() => setError(null), setError);
  const all = items.filter(({ path }) => PICTURE.test(path));
  const pictures = all.filter(({ size_bytes: size }) => size <= MAX_PICTURE_BYTES).slice(-MAX_PICTURES);
  return html`<${Failure} error=${error ?? artifacts.error ?? checkpoints.error} />
    ${pictures.length > 0 && html`<div class="card"><h2>Pictures</h2><div class="pictures">${pictures.map((one) => html`<${Picture} key=${one.id} jobId=${job.id} artifact=${one} />`)}</div>
      ${all.length > pictures.length && html`<p class="note">${pictures.length} of ${all.length} are shown: the newest up to ${bytes(MAX_PICTURE_BYTES)}.</p>`}</div>`}
    <div class="card"><h2>Artifacts</h2>${items.length === 0 ? html`<${None} asked=${artifacts} />` : html`<table><thead><tr><th>Path</th><th class="num">Size</th><th>Stored</th><td></td></tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.id}><td><${Path} path=${one.path} address=${artifactOf(job.id, one.id)} /></td><td class="num">${bytes(one.size_bytes)}</td><td title=${exactly(one.created_at)}>${clock(one.created_at)}</td>
        <td class="num"><button onClick=${() => save({ artifact: one.id })} aria-label=${`Download ${one.path}`}>Download</button></td></tr>`)}</tbody></table>`}</div>
    <div class="card"><h2>Checkpoints</h2>${saved.length === 0 ? html`<${None} asked=${checkpoints} />` : html`<table><thead><tr><th class="num">Step</th><th class="num">Attempt</th><th class="num">Metric</th><th class="num">Size</th><th>Stored</th><td></td></tr></thead>
      <tbody>${saved.map((one) => html`<tr key=${`${one.attempt}-${one.step}`}><td class="num">${number(one.step)}</td><td class="num">${one.attempt}</td><td class="num">${number(one.metric)}</td><td class="num">${bytes(one.size_bytes)}</td>
        <td title=${exactly(one.created_at)}>${clock(one.created_at)}${one.is_latest ? html` <span class="label">latest</span>` : ''}${one.is_best ? html` <span class="label">best</span>` : ''}</td>
        <td><${CheckpointFiles} job=${job} checkpoint=${one} save=${save} /></td></tr>`)}</tbody></table>`}</div>`;
}

const artifactOf = (jobId, id) => `v1/jobs/${jobId}/artifacts/${encodeURIComponent(id)}`;

// The path of a file. It is a link if the browser stays signed in, since a link sends the cookie, but no token.
const Path = ({ path, address }) => html`<code>${staysSignedIn() ? html`<a href=${urlOf(address)} download="">${path}</a>` : path}</code>`;

// Shows 'None' once the server has answered.
const None = ({ asked }) => (asked.data ? html`<p class="soft">None.</p>` : !asked.error && html`<${Loading} />`);

function CheckpointFiles({ job, checkpoint, save }) {
  const [open, setOpen] = useState(false);
  const path = `v1/jobs/${job.id}/checkpoints/${checkpoint.step}/files`;
  const files = usePoll(open ? path : null, {}, 0);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary>files</summary><${Failure} error=${files.error} />
    ${files.data?.items.map((file) => html`<p key=${file.path}><${Path} path=${file.path} address=${`${path}/${file.path.split('/').map(encodeURIComponent).join('/')}`} /> ${bytes(file.size_bytes)} <button onClick=${() => save({ checkpoint: { step: checkpoint.step, path: file.path } })}>Download</button></p>`)}
    <p class="soft">Download all: <code>dray checkpoints</code> <${Copy} text=${checkpoint.url} label="Copy its address" /></p></details>`;
}

// A picture is loaded as a blob, because an <img> sends no token.
function Picture({ jobId, artifact }) {
  const [url, setUrl] = useState(null);
  useEffect(() => {
    const controller = new AbortController();
    let made = null;
    send('GET', artifactOf(jobId, artifact.id), { signal: controller.signal })
      .then((response) => response.arrayBuffer())
      .then((content) => {
        made = URL.createObjectURL(new Blob([content], { type: TYPES[artifact.path.split('.').pop().toLowerCase()] }));
        setUrl(made);
      }, () => {});
    return () => {
      controller.abort();
      if (made) URL.revokeObjectURL(made);
    };
  }, [artifact.id]);
  return html`<figure>${url && html`<img src=${url} alt=${artifact.path} loading="lazy" />`}<figcaption>${artifact.path}</figcaption></figure>`;
}
