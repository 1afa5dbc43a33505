// What changed from one job to another: the document, the commit, the data, the packages, and the code.

import { address, link } from '../lib/address.js';
import { bytes, plural, whole } from '../lib/format.js';
import { html, useState } from '../lib/html.js';
import { usePoll } from '../lib/live.js';
import { useStore } from '../lib/stores.js';
import { Empty, Failure, Loading } from '../parts/common.js';
import { State, isJobId, toJob, valueText } from '../parts/job_parts.js';
import { namesOf } from '../parts/runs.js';

// Files with more changed lines are closed at first.
const MOST_OPEN = 300;
const LEFT_OUT = {
  binary: 'a binary file', large: 'too large to compare its lines', limit: 'not compared: the files that differ are too large together',
};

export function DiffPage() {
  const { params } = useStore(address);
  const ids = (params.get('jobs') ?? '').split(',').filter(isJobId);
  const isPair = ids.length === 2;
  const { data, error } = usePoll(isPair && 'v1/diff', { jobs: ids.join() }, 0);
  if (!isPair) return html`<h1 id="title">What changed</h1><${Empty}>This view compares two jobs. <a href="#/jobs">Choose two jobs</a> in the list and compare them.<//>`;
  if (!data) return html`<h1 id="title">What changed</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const names = namesOf(data.jobs);
  const heads = data.jobs.map((job) => html`<th key=${job.id}><a href=${toJob(job.id)} title=${job.id} style=${{ textDecoration: 'underline' }}>${names.get(job.id)}</a> <${State} job=${job} /></th>`);
  const rows = [
    ...data.document.map(({ pointer, values }) => [pointer, pointer, values]),
    ...(data.git.some(Boolean) ? [['commit', 'The commit of the uploaded code', data.git.map(commitOf)]] : []),
    ...(data.data.some(Boolean) ? [['data', 'The sources of the data', data.data.map((one) => one?.sources.join(', '))], ['sha256 of the data', 'As the document requires it', data.data.map((one) => one?.sha256 ?? 'not given')]] : []),
  ];
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">What changed</h1><span class="soft">from ${names.get(data.jobs[0].id)} to ${names.get(data.jobs[1].id)}</span>
      <span class="buttons"><a class="button" href=${link(['diff'], { jobs: [...ids].reverse().join() })}>Swap</a><a class="button" href=${link(['compare'], { jobs: ids.join() })}>Compare the curves</a></span></header>
    <h2>Document, commit and data</h2>
    ${rows.length ? html`<${Pairs} label="Document, commit and data" heads=${heads} rows=${rows} />` : html`<p class="soft">The documents are equal.</p>`}
    <h2>Packages</h2><${Packages} packages=${data.packages} heads=${heads} jobs=${data.jobs} names=${names} />
    <h2>Code</h2><${Code} code=${data.code} names=${names} /></section>`;
}

const named = (text, names) => [...names].reduce((found, [id, name]) => found.replaceAll(id, () => name), text);
const commitOf = (git) => git && `${git.commit.slice(0, 12)}${git.branch ? ` (${git.branch})` : ''}${git.dirty ? ', with changes that were not committed' : ''}`;

function Pairs({ label, heads, rows }) {
  return html`<div class="card" role="region" aria-label=${label} tabindex="0"><table class="differs"><thead><tr><td></td>${heads}</tr></thead>
    <tbody>${rows.map(([name, title, values]) => html`<tr key=${name} class=${valueText(values[0]) === valueText(values[1]) ? 'soft' : ''}><td title=${title}><code>${name}</code></td>${values.map((value, n) => html`<td key=${n}>${valueText(value)}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Packages({ packages, heads, jobs, names }) {
  const unknown = jobs.filter((_, n) => !packages.is_known[n]).map(({ id }) => names.get(id));
  if (unknown.length) return html`<p class="soft">Unknown for ${unknown.join(' and ')}: the ranks report their packages when they start.</p>`;
  if (!packages.differences.length) return html`<p class="soft">Both jobs had the same packages.</p>`;
  return html`<${Pairs} label="Packages" heads=${heads} rows=${packages.differences.map(({ name, versions }) => [name, name, versions])} />`;
}

// names: of the jobs, by id.
function Code({ code, names }) {
  if (code.notes.length) return html`<p class="soft">The code is not compared: ${code.notes.map((note) => named(note, names)).join('; ')}.</p>`;
  if (!code.num_files) return html`<p class="soft">Both jobs have the same code.</p>`;
  return html`<p class="soft">${plural(code.num_files, 'file')} differ${code.num_files === 1 ? 's' : ''}${code.files.length < code.num_files ? `; the first ${whole(code.files.length)} are shown` : ''}.</p>
    ${code.files.map((file) => html`<${FileChange} key=${file.path} file=${file} />`)}`;
}

function FileChange({ file }) {
  const { path, change, num_added: added, num_removed: removed, text, left_out: why } = file;
  const [isOpen, setIsOpen] = useState(Boolean(text) && added + removed <= MOST_OPEN);
  const sizes = [file.old_bytes, file.new_bytes].filter((size) => size !== null).map(bytes).join(' to ');
  const isMode = new Set(file.is_executable).size > 1;
  const about = html`<code>${path}</code> <span class="soft">${change}, ${sizes}${why ? `, ${LEFT_OUT[why] ?? why}` : ''}${isMode ? `, ${file.is_executable[1] ? 'now' : 'no longer'} executable` : ''}</span>
    ${added !== null && html` <span class="added">+${whole(added)}</span> <span class="removed">−${whole(removed)}</span>`}`;
  if (!text) return html`<p class="card changed">${about}</p>`;
  return html`<details class="card changed" open=${isOpen} onToggle=${(event) => setIsOpen(event.target.open)}><summary>${about}</summary>
    ${isOpen && html`<pre tabindex="0" role="region" aria-label=${`Changed lines of ${path}`}>${linesOf(text)}</pre>`}</details>`;
}

const KINDS = { '+': 'added', '-': 'removed', '@': 'soft' };

// The lines of a diff. Neighbouring lines of one kind are one element.
function linesOf(text) {
  const found = [];
  for (const line of text.replace(/\n$/, '').split('\n')) {
    const kind = KINDS[line[0]] ?? '';
    if (found.at(-1)?.kind === kind) found.at(-1).lines.push(line);
    else found.push({ kind, lines: [line] });
  }
  return found.map(({ kind, lines }, n) => html`<span key=${n} class=${kind}>${`${lines.join('\n')}\n`}</span>`);
}
