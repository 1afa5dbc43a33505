// Reports: the list, a report with its live charts, and its editor.

import { address, go, link } from '../lib/address.js';
import { change, get, getText } from '../lib/api.js';
import { clock, exactly } from '../lib/format.js';
import { html, useEffect, useState } from '../lib/html.js';
import { repeat, usePoll } from '../lib/live.js';
import { save } from '../lib/save.js';
import { useStore } from '../lib/stores.js';
import { Dialog, Empty, Failure, Loading, Menu } from '../parts/common.js';
import { More, usePages } from '../parts/pages.js';
import { Parts } from './reports/blocks.js';
import { ReportEditor } from './reports/editor.js';

const EVERY_MS = 10000;
const RETRY_MS = 3000;
const NEW = 'new';

export function ReportsPage({ path }) {
  const { params } = useStore(address);
  if (!path[1]) return html`<${List} />`;
  if (path[1] === NEW) return html`<${ReportEditor} before=${null} />`;
  return params.get('edit') ? html`<${Edited} id=${path[1]} />` : html`<${Shown} id=${path[1]} />`;
}

function List() {
  const { items, error, more } = usePages('v1/reports');
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">Reports</h1><a class="button" href=${link(['reports', NEW])}>New report</a></header>
    <${Failure} error=${error} />
    ${!items ? !error && html`<${Loading} />` : items.length === 0
      ? html`<${Empty}>There are no reports. A report is a page of text with charts and tables of runs.<//>`
      : html`<div class="card"><table><thead><tr><th>Title</th><th>Owner</th><th>Project</th><th>Changed</th></tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.id}><td class="sentence"><a href=${link(['reports', one.id])}>${one.title}</a></td><td>${one.owner}</td><td>${one.project ?? '–'}</td>
        <td class="kept" title=${exactly(one.updated_at)}>${clock(one.updated_at)}</td></tr>`)}</tbody></table><${More} more=${more} /></div>`}</section>`;
}

const pathOf = (id) => `v1/reports/${encodeURIComponent(id)}`;

function Shown({ id }) {
  const { data, error } = usePoll(pathOf(id), {}, EVERY_MS);
  const [failed, setFailed] = useState(null);
  const [isDeleting, setIsDeleting] = useState(false);
  useEffect(() => { if (data) document.title = `${data.title} - dray`; }, [data?.title]);
  if (!data) return html`<h1>Report</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const done = (action) => action.then(() => setFailed(null), setFailed);
  const exported = (values) => done(getText(`${pathOf(id)}/html`, { values: values || null }).then((text) => save(`${id}.html`, new Blob([text], { type: 'text/html' }))));
  const remove = () => {
    setIsDeleting(false);
    done(change('DELETE', pathOf(id)).then(() => go(['reports'])));
  };
  return html`<article class="report" aria-labelledby="title"><header class="head"><h1 id="title">${data.title}</h1>
      <span class="soft" title=${exactly(data.updated_at)}>${data.owner}${data.project ? `, project ${data.project}` : ''}; version ${data.version} of ${clock(data.updated_at)}</span>
      <span class="buttons"><a class="button" href=${link(['reports', id], { edit: 1 })}>Edit</a>
        <${Menu} label="Export or delete"><button onClick=${() => exported(false)}>Save as HTML</button><button onClick=${() => exported(true)}>Save as HTML with values</button>
          <button class="danger" onClick=${() => setIsDeleting(true)}>Delete</button><//></span></header>
    <${Failure} error=${failed ?? error} />
    ${data.problem && html`<p class="failure" role="status">Its charts can't be shown: ${data.problem}</p>`}
    ${data.text.trim() ? html`<${Parts} parts=${data.parts} />` : html`<${Empty}>This report has no text yet.<//>`}
    ${isDeleting && html`<${Dialog} title="Delete the report?" onClose=${() => setIsDeleting(false)}><p>${data.title} will be deleted. Its runs remain.</p>
      <p class="buttons"><button onClick=${() => setIsDeleting(false)}>Keep it</button><button class="danger" onClick=${remove}>Delete it</button></p><//>`}</article>`;
}

// The editor of a report, which is read once, so that later versions don't replace what is being typed.
function Edited({ id }) {
  const [{ data, error }, setState] = useState({ data: null, error: null });
  useEffect(() => {
    const controller = new AbortController();
    repeat(async (signal) => {
      const found = await get(pathOf(id), {}, signal);
      if (!signal.aborted) setState({ data: found, error: null });
      return true;
    }, { every: RETRY_MS, signal: controller.signal, onError: (raised) => raised && setState({ data: null, error: raised }) });
    return () => controller.abort();
  }, [id]);
  if (!data) return html`<h1>Report</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  return html`<${ReportEditor} key=${data.id} before=${data} />`;
}
