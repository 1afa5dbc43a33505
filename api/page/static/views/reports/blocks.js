// The parts of a report: Markdown, and the charts and tables of runs, which are kept up to date.

import { get } from '../../lib/api.js';
import { AXES, COUNTERS, placesOn } from '../../lib/axes.js';
import { DASHES, coloursOf } from '../../lib/colours.js';
import { plural } from '../../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { repeat, useNow, usePoll } from '../../lib/live.js';
import { markdown } from '../../lib/markdown.js';
import { LiveSeries } from '../../lib/series.js';
import { Chart, drawn } from '../../parts/chart.js';
import { Failure, Loading, Menu } from '../../parts/common.js';
import { useDetails } from '../../parts/details.js';
import { ENDED, JobLink } from '../../parts/job_parts.js';
import { namesOf } from '../../parts/runs.js';
import { useSeen } from '../../parts/virtual.js';
import { columnOf, requested, split } from '../jobs/columns.js';

const LIVE_MS = 4000;
const OVER_MS = 30000; // a search can find other jobs later
const ZOOMED = 7; // digits, which distinguish the pixels of most zooms

// parts: `parts` of the API's answer.
export function Parts({ parts }) {
  return parts.map((part, n) => {
    if (part.kind === 'chart') return html`<${ReportChart} key=${n} block=${part.block} query=${part.query} />`;
    if (part.kind === 'table') return html`<${ReportTable} key=${n} block=${part.block} query=${part.query} />`;
    return html`<${Prose} key=${n} text=${part.text} />`;
  });
}

function Prose({ text }) {
  const shown = useMemo(() => markdown(text, 1), [text]);
  return html`<div class="notes prose">${shown}</div>`;
}

// The jobs in the order of the block, and sentences about missing jobs.
function selected({ runs }, { items, next_cursor: more }, limit) {
  if (!runs.length) {
    if (!items.length) return { jobs: [], notes: ['No run matches.'] };
    return { jobs: items, notes: more ? [`More runs match. The first ${limit} are shown.`] : [] };
  }
  const byId = new Map(items.map((job) => [job.id, job]));
  return {
    jobs: runs.filter((id) => byId.has(id)).map((id) => byId.get(id)),
    notes: runs.filter((id) => !byId.has(id)).map((id) => `No job has the id ${id}. It may have been deleted.`),
  };
}

// The jobs of a chart and their series, polled once the chart is in view.
function useRuns(block, query, axis, isSeen) {
  const [state, setState] = useState({ found: null, series: {}, error: null });
  const key = isSeen && JSON.stringify([query, block.runs, block.metrics, axis]);
  useEffect(() => {
    setState((was) => ({ ...was, error: null }));
    if (!key) return undefined;
    const controller = new AbortController();
    const live = new Map();
    const whole = new Set();
    const keys = [...block.metrics, ...(COUNTERS[axis] ?? []), ...(axis === 'bytes' ? ['sync/sent_bytes'] : [])];
    let isOver = false;
    repeat(async (signal) => {
      const found = selected(block, await get('v1/jobs', { ...query, brief: AXES[axis].ofJob ? null : true }, signal), query.limit);
      for (const { id, state: at } of found.jobs) {
        if (whole.has(id)) continue;
        if (!live.has(id)) live.set(id, new LiveSeries(id, { keys, times: Boolean(AXES[axis].timed) }));
        await live.get(id).read(signal);
        if (ENDED.has(at)) whole.add(id);
      }
      isOver = found.jobs.every(({ id }) => whole.has(id));
      if (!signal.aborted) setState({ key, found, series: Object.fromEntries(found.jobs.map(({ id }) => [id, live.get(id).series])), error: null });
    }, { every: () => (isOver ? OVER_MS : LIVE_MS), signal: controller.signal, onError: (error) => error && setState((was) => ({ ...was, error })) });
    return () => controller.abort();
  }, [key]);
  return state.key === key ? state : { found: null, series: {}, error: state.error };
}

function ReportChart({ block, query }) {
  const box = useRef(null);
  const saver = useRef(null);
  const [range, setRange] = useState(null);
  const { metrics, title, scale, smoothing, x, y_min: least, y_max: most } = block;
  const axis = x === 'step' ? '' : x;
  const { found, series, error } = useRuns(block, query, axis, useSeen(box));
  const jobs = found?.jobs ?? [];
  const places = useMemo(() => new Map(jobs.map((job) => [job.id, placesOn(axis, series[job.id], job)])), [axis, found, series]);
  const closer = useDetails(places, series, range, metrics);
  const zoom = (to) => setRange(to && to.map((value) => Number(value.toPrecision(Math.max(ZOOMED, Math.ceil(Math.log10(Math.abs(value) / (to[1] - to[0]) || 1)) + 4)))));
  const names = useMemo(() => namesOf(jobs), [found]);
  const colours = useMemo(() => coloursOf(jobs), [found]);
  const curves = useMemo(() => metrics.flatMap((key, n) => jobs.filter(({ id }) => places.get(id)).flatMap(({ id }) => {
    const points = closer[id]?.[key] ?? series[id][key];
    if (!points?.steps.length) return [];
    const name = metrics.length > 1 ? `${names.get(id)}, ${key}` : names.get(id);
    return [{ name, id, colour: colours.get(id), ...(metrics.length > 1 && { dash: DASHES[n % DASHES.length] }), xs: points.steps.map((step) => places.get(id)(step)), ...drawn(points.values) }];
  })), [found, series, closer, places]);
  const name = title || metrics.join(', ');
  const missing = metrics.map((key) => [key, jobs.filter(({ id }) => !places.get(id) || !series[id][key]?.steps.length)]).filter(([, without]) => without.length);
  const notes = [...(found?.notes ?? []), ...missing.map(([key, without]) => `No values of ${key}${axis && ` by ${axis}`}: ${without.map(({ id }) => names.get(id)).join(', ')}.`)];
  const formats = ['PNG', 'SVG', 'CSV'];
  return html`<section class="panel in-report" ref=${box} aria-label=${name}>
    <div class="panel-head"><h2 class="minor">${name}</h2><span>${range && html`<button class="quiet" onClick=${() => setRange(null)}>Show all</button>`}<${Menu} label=${`Tools of ${name}`}>
      ${formats.map((format) => html`<button key=${format} onClick=${() => saver.current?.(format.toLowerCase())}>Save as ${format}</button>`)}<//></span></div>
    <${Failure} error=${error} />
    ${found ? curves.length > 0 && html`<${Chart} curves=${curves} log=${scale === 'log'} smooth=${smoothing} range=${range} yRange=${least === null && most === null ? null : [least, most]} onZoom=${zoom}
      axis=${axis || 'step'} label=${`${name} of ${plural(jobs.length, 'run')}`} title=${name} saver=${saver} />` : !error && html`<div class="plot"><${Loading} /></div>`}
    <${Notes} notes=${notes} /></section>`;
}

const Notes = ({ notes }) => notes.map((note) => html`<p key=${note} class="soft">${note}</p>`);

function ReportTable({ block, query }) {
  const names = split(block.columns);
  const columns = names.map(columnOf);
  const { data, error } = usePoll('v1/jobs', { ...query, columns: requested(names), brief: true }, 10000);
  const now = useNow(10000);
  const found = data && selected(block, data, query.limit);
  const titles = found && namesOf(found.jobs);
  return html`<section class="card in-report" role="region" aria-label=${block.title || 'Runs'} tabindex="0">${block.title && html`<h2 class="minor">${block.title}</h2>`}
    <${Failure} error=${error} />
    ${found ? found.jobs.length > 0 && html`<table><thead><tr><th>Run</th>${columns.map(({ name, title, className }) => html`<th key=${name} class=${className.includes('num') ? 'num' : ''}>${title}</th>`)}</tr></thead>
      <tbody>${found.jobs.map((job) => html`<tr key=${job.id}><td><${JobLink} job=${job}>${titles.get(job.id)}<//></td>${columns.map(({ name, cell, className }) => html`<td key=${name} class=${className.includes('num') ? 'num' : ''}>${cell(job, now)}</td>`)}</tr>`)}</tbody></table>` : !error && html`<${Loading} />`}
    ${found && html`<${Notes} notes=${found.notes} />`}</section>`;
}
