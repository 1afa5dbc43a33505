// What a job reported in addition to numbers, by series, at the step that the reader chooses.

import { address, adjust } from '../../lib/address.js';
import { send } from '../../lib/api.js';
import { bytes, plural, whole } from '../../lib/format.js';
import { html, useEffect, useRef, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { useStore } from '../../lib/stores.js';
import { Failure, Loading } from '../../parts/common.js';
import { ENDED } from '../../parts/job_parts.js';
import { HeatMap } from '../../parts/heat_map.js';
import { SHOWN } from '../../parts/media_values.js';
import { useSeen } from '../../parts/virtual.js';

export const KINDS = {
  image: 'Picture', histogram: 'Histogram', confusion_matrix: 'Confusion matrix', pr_curve: 'Precision-recall curve', roc_curve: 'ROC curve',
  audio: 'Audio', table: 'Table', text: 'Text',
};
const EVERY_MS = 5000;

export function Media({ job }) {
  const { params } = useStore(address);
  const every = ENDED.has(job.state) ? 0 : EVERY_MS;
  const { data, error } = usePoll(`v1/jobs/${job.id}/media`, {}, every);
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const only = params.get('media') || '';
  const words = only.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.items.filter(({ key }) => words.every((word) => key.toLowerCase().includes(word)));
  return html`<${Failure} error=${error} />
    ${data.items.length === 0 && html`<p class="soft">Nothing has been reported yet. A script reports pictures, histograms and more with
      <code>${"dray.train.report(step, image={'sample': picture})"}</code>. <a href="manual/guides/media.html" target="_blank" rel="noopener">Media of scripts</a></p>`}
    ${data.num_left_out > 0 && html`<p class="note">${plural(data.num_left_out, 'value')} ${data.num_left_out === 1 ? 'was' : 'were'} left out; the log and the events state the reasons.
      A job can store ${whole(data.max_records)} records of ${bytes(data.max_bytes)}.</p>`}
    ${data.items.length > 1 && html`<div class="toolbar"><input type="search" aria-label="Media whose key contains" placeholder="keys" value=${only} onInput=${(event) => adjust({ media: event.target.value }, true)} /></div>`}
    <div class="media">${inOrder(found).map((one) => html`<${Series} key=${`${one.kind} ${one.rank} ${one.key}`} jobId=${job.id} series=${one} at=${params.get('at')} every=${every} />`)}</div>`;
}

const place = ({ kind }) => Object.keys(KINDS).indexOf(kind);
export const inOrder = (series) => [...series].sort((a, b) => place(a) - place(b));

// at: the step in the address. Each series shows its newest record up to this step. every: the polling period of what changes.
export function Series({ jobId, series, at, every, title = nameOf(series) }) {
  const box = useRef(null);
  const seen = useSeen(box);
  return html`<section class=${`card media-${series.kind}`} ref=${box} aria-label=${`${KINDS[series.kind]} ${title}`}><h3 class="minor">${title} <span class="soft">${KINDS[series.kind]}</span></h3>${seen && html`<${Seen} jobId=${jobId} series=${series} at=${at} every=${every} title=${title} />`}</section>`;
}

export const nameOf = ({ key, rank }) => (rank ? `${key}, rank ${rank}` : key);

function Seen({ jobId, series, at, every, title }) {
  const { steps, kind, key, rank } = series;
  const step = stepAt(steps, at);
  const path = `v1/jobs/${jobId}/media/records`;
  const { data, error } = usePoll(path, { kind, key, rank, step }, 0);
  // Show the record of the previous step until the next record has arrived.
  const last = useRef(null);
  if (data?.items.length) [last.current] = data.items;
  const Shown = SHOWN[kind];
  return html`<${Steps} steps=${steps} step=${step} title=${title} /><${Failure} error=${error} />
    ${kind === 'histogram' && steps.length > 1 && html`<${HeatMap} path=${path} query=${{ kind, key, rank, max_records: 100 }} every=${every} step=${step} title=${title} />`}
    ${last.current ? html`<${Shown} jobId=${jobId} record=${last.current} title=${title} useFile=${useFile} />` : !error && html`<${Loading} />`}`;
}

// The newest step up to `at`, or the first one; without `at`, the newest of all.
function stepAt(steps, at) {
  if (at === null || at === '' || !Number.isFinite(Number(at))) return steps.at(-1);
  return steps.findLast((step) => step <= Number(at)) ?? steps[0];
}

function Steps({ steps, step, title }) {
  const n = steps.indexOf(step);
  const choose = (event) => {
    const chosen = Number(event.target.value);
    adjust({ at: chosen === steps.length - 1 ? '' : steps[chosen] }, true);
  };
  return html`<div class="step">${steps.length > 1 && html`<input type="range" min="0" max=${steps.length - 1} step="1" value=${n} aria-label=${`Step of ${title}`} aria-valuetext=${`step ${whole(step)}`} onInput=${choose} />`}
    <span class="soft">step ${whole(step)}</span></div>`;
}

// The URL of a file, which is loaded as a blob, because <img> and <audio> send no token: {url, error}.
function useFile(jobId, file) {
  const [found, setFound] = useState({});
  useEffect(() => {
    const controller = new AbortController();
    send('GET', `v1/jobs/${jobId}/media/files/${file.sha256}`, { signal: controller.signal, read: (response) => response.arrayBuffer() }).then(
      (content) => setFound({ sha256: file.sha256, url: URL.createObjectURL(new Blob([content], { type: file.media_type })) }),
      (error) => { if (!controller.signal.aborted) setFound({ sha256: file.sha256, error }); },
    );
    return () => controller.abort();
  }, [jobId, file.sha256]);
  useEffect(() => () => { if (found.url) URL.revokeObjectURL(found.url); }, [found.url]);
  return found;
}
