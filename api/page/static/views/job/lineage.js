// The jobs from which a job was made, and the jobs and models that were made from it, as a graph from left to right.

import { link } from '../../lib/address.js';
import { plural, whole } from '../../lib/format.js';
import { html } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Failure, Loading } from '../../parts/common.js';
import { nameOf, toJob } from '../../parts/job_parts.js';

const EVERY_MS = 30000;
const [WIDTH, HEIGHT, GAP, SPACE] = [210, 52, 76, 14];
const LONGEST = 28;
const HOW = { init_from: 'starts from', edited: 'was edited from', registered: 'was registered from' };

export function Lineage({ job }) {
  const { data, error } = usePoll(`v1/jobs/${job.id}/lineage`, {}, EVERY_MS);
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  return html`<${Failure} error=${error} />
    ${data.array_id && html`<p>This job belongs to <a href=${data.is_sweep ? link(['compare'], { sweep: data.array_id }) : link(['jobs'], { text: data.array_id })}>${data.is_sweep ? 'a sweep' : 'an array'}</a>.</p>`}
    ${data.links.length ? html`<${Graph} lineage=${data} /><p class="soft">Solid lines: a job starts from the weights of another one, or a version of a model has its files. Dashed lines: the document of a job is an edited copy.</p>` : html`<p class="soft">This job was made from no other job, and nothing was made from it.</p>`}
    ${!data.is_complete && html`<p class="soft">There are more jobs than are shown.</p>`}`;
}

// The column of each node: 0 for the job itself, less for what it was made from.
function columnsOf({ job_id: own, links }) {
  const columns = new Map([[own, 0]]);
  for (const [from, to, step] of [['child', 'parent', -1], ['parent', 'child', 1]]) {
    let level = [own];
    for (let column = step; level.length; column += step) {
      level = links.filter((one) => level.includes(one[from]) && !columns.has(one[to])).map((one) => one[to]);
      for (const id of level) columns.set(id, column);
    }
  }
  // Versions of models that were registered from ancestors.
  for (const one of links) if (!columns.has(one.child)) columns.set(one.child, (columns.get(one.parent) ?? 0) + 1);
  return columns;
}

function nodeOf(id, job) {
  if (id.startsWith('model://')) {
    const [, name, version] = /^model:\/\/(.+)@(\d+)$/.exec(id);
    return { title: `${name}@${version}`, about: 'a version of a model', href: link(['models', name], { version }) };
  }
  if (!job?.name) return { title: id, about: 'deleted', href: null };
  const attempts = job.attempts > 1 ? `, ${plural(job.attempts, 'attempt')}` : '';
  return { title: [nameOf(job), job.variant].filter(Boolean).join(' '), about: `${job.state}${attempts}, ${job.owner}`, href: toJob(id) };
}

const short = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

function Graph({ lineage }) {
  const jobs = new Map(lineage.jobs.map((one) => [one.id, one]));
  const columns = columnsOf(lineage);
  const first = Math.min(...columns.values());
  const rows = new Map();
  const places = new Map([...columns].map(([id, column]) => {
    const row = rows.get(column) ?? 0;
    rows.set(column, row + 1);
    return [id, { x: (column - first) * (WIDTH + GAP), y: row * (HEIGHT + SPACE) }];
  }));
  const width = (Math.max(...columns.values()) - first + 1) * (WIDTH + GAP) - GAP;
  const height = Math.max(...rows.values()) * (HEIGHT + SPACE) - SPACE;
  const described = (id) => lineage.links.filter((one) => one.child === id).map((one) => `${HOW[one.kind]} ${nodeOf(one.parent, jobs.get(one.parent)).title}${one.step === null ? '' : `, step ${whole(one.step)}`}`).join('; ');
  return html`<div class="card lineage"><svg width=${width + 4} height=${height + 4} viewBox=${`-2 -2 ${width + 4} ${height + 4}`} role="group" aria-label="Lineage">
    <g aria-hidden="true">${lineage.links.map((one) => {
      const [from, to] = [places.get(one.parent), places.get(one.child)];
      const [x, y, right, low] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
      return html`<g key=${`${one.parent} ${one.child} ${one.kind}`}><path class=${one.kind} d=${`M${x} ${y}C${x + GAP / 2} ${y} ${right - GAP / 2} ${low} ${right} ${low}`} />
        ${one.step !== null && html`<text x=${(x + right) / 2} y=${(y + low) / 2 - 5} text-anchor="middle">${whole(one.step)}</text>`}</g>`;
    })}</g>
    ${[...places].map(([id, { x, y }]) => {
      const { title, about, href } = nodeOf(id, jobs.get(id));
      const from = described(id);
      const box = html`<title>${[title, about, from].filter(Boolean).join('; ')}</title><rect x=${x} y=${y} width=${WIDTH} height=${HEIGHT} rx="8" /><text x=${x + 10} y=${y + 22}>${short(title)}</text><text class="about" x=${x + 10} y=${y + 40}>${short(about)}</text>`;
      const kind = id === lineage.job_id ? 'own' : '';
      return href ? html`<a key=${id} class=${kind} href=${href} aria-label=${[title, about, from].filter(Boolean).join('; ')}>${box}</a>` : html`<g key=${id} class=${kind}>${box}</g>`;
    })}</svg></div>`;
}
