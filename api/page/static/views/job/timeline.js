// The history of a job, as a timeline and as a list of events.

import { clock, duration, exactly, seconds } from '../../lib/format.js';
import { html, useEffect, useRef, useState } from '../../lib/html.js';
import { useNow } from '../../lib/live.js';
import { Loading } from '../../parts/common.js';
import { Message } from '../../parts/job_parts.js';

const FAULTS = new Set(['divergence', 'drill', 'hang', 'regrouping']);

const isFault = (event) => FAULTS.has(event.type) || event.code === 'not_answering' || (event.type === 'stragglers' && event.data.ranks.length > 0) || event.to_state === 'RECOVERING' || (event.from_state && event.to_state === 'QUEUED' && event.code !== 'preempted');

export function Timeline({ job, events, attempts, checkpoints }) {
  const box = useRef(null);
  const [width, setWidth] = useState(900);
  const now = useNow(3000);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.max(200, entry.contentRect.width)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const begin = new Date(job.created_at).getTime();
  const known = [job.finished_at, events.at(-1)?.time].filter(Boolean).map((time) => new Date(time).getTime());
  const end = job.finished_at ? new Date(job.finished_at).getTime() : Math.max(now, ...known);
  const moves = events.filter((event) => event.to_state);
  const spans = moves.map((event, i) => ({ state: event.to_state, from: event.time, to: moves[i + 1]?.time ?? end, why: event.message }));
  const { at, isShortened } = scaleOf(spans, begin, end);
  const x = (time) => at(new Date(time).getTime()) * width;
  const faults = events.filter(isFault);
  return html`<div ref=${box}><h2 class="minor soft">Timeline <span class="num">${clock(begin)} – ${job.finished_at ? clock(end) : 'now'}, ${duration((end - begin) / 1000)}</span></h2>
    <svg class="timeline" viewBox=${`0 0 ${width} 58`} role="img" aria-label=${`States over time: ${spans.map(({ state, from, to }) => `${state} for ${duration(seconds(from, to))}`).join(', ')}`}>
      <rect class="lane" x="0" y="4" width=${width} height="18" rx="4" />
      ${spans.filter(({ state }) => !['SUCCEEDED', 'FAILED', 'CANCELLED'].includes(state)).map(({ state, from, to, why }, i) => html`<rect key=${i} class=${`fill-${state.toLowerCase()}`}
        x=${x(from)} y="4" width=${Math.max(1.5, x(to) - x(from))} height="18"><title>${state} from ${clock(from)} for ${duration(seconds(from, to))}: ${why}</title></rect>`)}
      <rect class="lane" x="0" y="30" width=${width} height="10" rx="3" />
      ${attempts.filter((one) => one.started_at || one.created_at).map((one) => html`<rect key=${one.attempt} class="fill-running" opacity=${one.attempt % 2 ? 0.75 : 0.5} rx="3"
        x=${x(one.created_at)} y="30" width=${Math.max(2, x(one.finished_at ?? end) - x(one.created_at))} height="10"><title>attempt ${one.attempt}, ${one.world_size} workers, from step ${one.resume_step}${one.reason ? `: ${one.reason.message}` : ''}</title></rect>`)}
      ${checkpoints.map((one) => html`<circle key=${`${one.attempt}-${one.step}`} class="mark saved" cx=${x(one.created_at)} cy="35" r="4"><title>checkpoint at step ${one.step}, ${clock(one.created_at)}</title></circle>`)}
      ${faults.map((event) => html`<path key=${event.seq} class="mark" d=${`M${x(event.time)} 0l6 9h-12z`}><title>${clock(event.time)}: ${event.message}</title></path>`)}
      <text x="0" y="54">attempts (lower), states (upper); ▲ faults, ● checkpoints${isShortened ? '; waits are drawn shorter than they were' : ''}</text>
    </svg></div>`;
}

// The position of a time between `begin` and `end`, from 0 to 1. If the job has waited for longer than half as
// long as it has run, all waits together take a third of the width.
export function scaleOf(spans, begin, end) {
  const waits = spans.filter(({ state }) => state === 'QUEUED').map(({ from, to }) => [from, to].map((time) => Math.min(end, Math.max(begin, new Date(time).getTime()))));
  const waitedUntil = (time) => waits.reduce((sum, [from, to]) => sum + Math.max(0, Math.min(time, to) - from), 0);
  const [all, waited] = [Math.max(1, end - begin), waitedUntil(end)];
  const isShortened = waited < all && waited > (all - waited) / 2;
  const factor = isShortened ? (all - waited) / 2 / waited : 1;
  const length = (time) => time - begin - (1 - factor) * waitedUntil(time);
  const whole = Math.max(1, all - (1 - factor) * waited);
  return { at: (time) => length(Math.min(end, Math.max(begin, time))) / whole, isShortened };
}

export function EventList({ events }) {
  if (!events.length) return html`<${Loading} />`; // every job has at least one
  return html`<div class="card"><table class="events"><thead><tr><th>Time</th><th>Event</th><th>What happened</th></tr></thead>
    <tbody>${[...events].reverse().map((event) => html`<tr key=${event.seq}>
      <td title=${exactly(event.time)}>${clock(event.time)}</td>
      <td>${event.to_state ? html`<span class=${`state state-${event.to_state.toLowerCase()}`}>${event.to_state}</span>` : html`<code>${event.type}</code>`}</td>
      <td><${Message} text=${event.message} />${event.actor && event.actor !== 'anonymous' ? html` <span class="soft">by ${event.actor}</span>` : ''}</td></tr>`)}</tbody></table></div>`;
}

// The time of the job's last change of state or of its first step, whichever is later.
export function changedAt(job, events) {
  const move = events.findLast((event) => event.to_state);
  return Math.max(...[job?.first_step_at, move?.time].map((time) => (time ? new Date(time).getTime() : 0)));
}

// Steps to mark in the curves: starts of attempts, and faults.
export function marksOf(events, attempts) {
  const marks = attempts.filter((one) => one.attempt > 1).map((one) => ({ x: one.resume_step }));
  for (const event of events) if (isFault(event) && Number.isFinite(event.data?.step)) marks.push({ x: event.data.step });
  return marks;
}
