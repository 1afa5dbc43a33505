// The line of the log that a failed job's reason is about.

import { get } from '../../lib/api.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { repeat } from '../../lib/live.js';
import { number } from '../../lib/format.js';
import { rankName } from '../../lib/topology.js';
import { toJob } from '../../parts/job_parts.js';

const LONGEST = 300;

// The address of a line, as in the parameter `line`.
export const keyOf = ({ attempt, rank, number: line }) => `${attempt}.${rank}.${line}`;

// {attempt, rank, texts} of the reason of a failed job: `texts` are texts to search for, the most exact first.
// The server adds notes in brackets to the error, such as '(max_retries is 0)'.
function reasonOf(job, events) {
  if (job.state !== 'FAILED') return null;
  const end = events.findLast((event) => event.to_state === 'FAILED');
  if (!end) return null;
  const rank = end.data?.rank ?? /\brank (\d+)\b/.exec(end.message)?.[1];
  if (rank === undefined) return null;
  const error = /([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b[^\n]*)/.exec(end.message)?.[1];
  const texts = [];
  for (let text = error?.trim(), shorter; text; text = shorter === text ? '' : shorter) {
    texts.push(text.slice(0, LONGEST));
    shorter = text.replace(/ ?\([^()]*\)$/, '');
  }
  return { attempt: end.attempt, rank: Number(rank), texts };
}

// {attempt, rank, line} of a failed job: `line` is the last line that contains the error, null if the log of
// the rank doesn't contain it. Null until the log has been searched, and for other jobs.
export function useFailureLine(job, events) {
  const [found, setFound] = useState(null);
  const reason = reasonOf(job, events);
  const { attempt, rank, texts } = reason ?? {};
  const wanted = texts?.join('\n');
  useEffect(() => {
    setFound(null);
    if (!reason) return undefined;
    const controller = new AbortController();
    let cursor = null;
    let line = null;
    const left = [...texts];
    repeat(async (signal) => {
      if (left.length) {
        const page = await get(`v1/jobs/${job.id}/logs`, { rank, attempt, contains: left[0], cursor }, signal);
        line = page.items.at(-1) ?? line;
        const isEnd = page.complete || page.next_cursor === cursor;
        cursor = isEnd ? null : page.next_cursor;
        if (!isEnd) return false;
        left.shift();
        if (!line && left.length) return false;
      }
      if (!signal.aborted) setFound({ attempt, rank, line });
      return true;
    }, { every: 0, signal: controller.signal });
    return () => controller.abort();
  }, [job.id, attempt, rank, wanted]);
  return found;
}

// A link to the line, and its text; a link to the log of the rank if the line is unknown.
export function FailureLine({ job, events }) {
  const found = useFailureLine(job, events);
  if (!found) return null;
  const { attempt, rank, line } = found;
  const who = rankName(job.spec, rank);
  if (!line) return html`<p><a href=${toJob(job.id, 'logs', { rank, attempt })}>Log of ${who} in attempt ${attempt}</a></p>`;
  return html`<p><a href=${toJob(job.id, 'logs', { line: keyOf(line) })}>Line ${number(line.number + 1)} of the log of ${who}</a></p>`;
}
