// The output of a job's ranks, with colours, search, and following of new lines.

import { address, adjust } from '../../lib/address.js';
import { download, get } from '../../lib/api.js';
import { pieces, plain } from '../../lib/ansi.js';
import { plural } from '../../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { repeat, useWhileLooked } from '../../lib/live.js';
import { useStore } from '../../lib/stores.js';
import { rankName } from '../../lib/topology.js';
import { Empty, Failure, Loading } from '../../parts/common.js';
import { useVirtual } from '../../parts/virtual.js';

const LINE = 19;
const PAGE = 5000;
const MOST = 200000;
const WIDEST = 4000;

export function Logs({ job }) {
  const { params } = useStore(address);
  const rank = params.get('rank') || '';
  const attempt = params.get('attempt') || '';
  const text = params.get('find') || '';
  const [alone, setAlone] = useState(false);
  const [follow, setFollow] = useState(true);
  const { lines, dropped, complete, known, error } = useLines(job.id, rank, attempt);
  const [refused, setRefused] = useState(null);
  const log = { rank: rank ? Number(rank) : null, attempt: attempt ? Number(attempt) : null };
  const save = () => download(job.id, { log }).then(() => setRefused(null), setRefused);
  const needle = text.toLowerCase();
  const shown = useMemo(() => {
    if (!needle || !alone) return lines;
    return lines.filter((line) => plain(line.text).toLowerCase().includes(needle));
  }, [lines, needle, alone]);
  const hits = useMemo(() => {
    if (!needle) return [];
    const found = [];
    shown.forEach((line, i) => { if (plain(line.text).toLowerCase().includes(needle)) found.push(i); });
    return found;
  }, [shown, needle]);
  const box = useRef(null);
  const { first, last, above, below } = useVirtual(box, shown.length, LINE);
  const [hit, setHit] = useState(-1);
  useEffect(() => setHit(-1), [needle, alone]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown.length, follow]);
  const jump = (step) => {
    if (!hits.length) return;
    const next = (Math.max(hit, step < 0 ? 0 : -1) + step + hits.length) % hits.length;
    setHit(next);
    setFollow(false);
    box.current.scrollTop = hits[next] * LINE - box.current.clientHeight / 2;
  };
  const scrolled = (event) => { // the event can arrive after the box was removed from the page
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    if (follow && scrollHeight - scrollTop - clientHeight > 3 * LINE) setFollow(false);
  };
  const ranks = Array.from({ length: job.world_size }, (_, n) => n);
  const attempts = Array.from({ length: job.attempt }, (_, n) => n + 1);
  return html`<div class="toolbar">
      <select aria-label="Rank" value=${rank} onChange=${(event) => adjust({ rank: event.target.value })}><option value="">all ranks</option>${ranks.map((n) => html`<option key=${n} value=${n}>${rankName(job.spec, n)}</option>`)}</select>
      <select aria-label="Attempt" value=${attempt} onChange=${(event) => adjust({ attempt: event.target.value })}><option value="">all attempts</option>${attempts.map((n) => html`<option key=${n} value=${n}>attempt ${n}</option>`)}</select>
      <input type="search" placeholder="search" aria-label="Search the log; Enter goes to the next match" value=${text} onInput=${(event) => adjust({ find: event.target.value }, true)}
        onKeyDown=${(event) => event.key === 'Enter' && jump(event.shiftKey ? -1 : 1)} />
      ${text && html`<span role="status" class="soft">${hits.length ? `${hit >= 0 ? `${hit + 1} of ` : ''}${plural(hits.length, 'hit')}` : 'no hit'}</span>
        <button aria-label="Previous hit" onClick=${() => jump(-1)}>↑</button><button aria-label="Next hit" onClick=${() => jump(1)}>↓</button>
        <label><input type="checkbox" checked=${alone} onChange=${(event) => setAlone(event.target.checked)} /> only hits</label>`}
      <label><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} /> follow</label>
      <span class="soft">${plural(lines.length, 'line')}${complete ? '' : ', more may follow'}</span>
      <button aria-label="Download the log" onClick=${save}>Download</button>
    </div>
    <${Failure} error=${error ?? refused} />
    ${dropped > 0 && html`<p class="note">The first ${plural(dropped, 'line')} are not shown; the download has all lines.</p>`}
    <div class="log" ref=${box} tabindex="0" role="log" aria-label="Output" aria-live="off" onScroll=${scrolled}>
      ${!known && !error && html`<${Loading} />`}
      ${known && !lines.length && html`<${Empty}>${complete ? 'There is no output.' : 'No output yet.'}<//>`}
      <div class="lines">
        <div style=${{ height: `${above}px` }}></div>
        ${shown.slice(first, last).map((line, i) => html`<${Line} key=${line.n} spec=${job.spec} line=${line} isHit=${hits[hit] === first + i} withRank=${!rank} />`)}
        <div style=${{ height: `${below}px` }}></div>
      </div></div>`;
}

function Line({ spec, line, isHit, withRank }) {
  const text = line.text.length > WIDEST ? `${line.text.slice(0, WIDEST)} …` : line.text;
  return html`<div class=${isHit ? 'line hit' : 'line'}>
    <span class="from" title=${`attempt ${line.attempt}, ${rankName(spec, line.rank)}, ${new Date(line.time).toLocaleString()}`}>${withRank ? `${line.attempt}.${line.rank}` : new Date(line.time).toLocaleTimeString()}</span><span>${
      pieces(text).map(({ text: piece, className }) => (className ? html`<span class=${className}>${piece}</span>` : piece))}</span></div>`;
}

// All lines so far, and new lines by long polls while the page is visible.
function useLines(jobId, rank, attempt) {
  const empty = { lines: [], dropped: 0, complete: false, known: false, error: null };
  const [state, setState] = useState(empty);
  const place = useRef({});
  useEffect(() => {
    place.current = { cursor: null, n: 0, complete: false, dropped: 0, lines: [] };
    setState(empty);
  }, [jobId, rank, attempt]);
  useWhileLooked((signal) => {
    const at = place.current;
    if (at.complete) return;
    repeat(async () => {
      const page = await get(`v1/jobs/${jobId}/logs`, { rank, attempt, cursor: at.cursor, limit: PAGE, wait_s: at.cursor ? 20 : 0 }, signal);
      if (signal.aborted || at !== place.current) return true;
      at.cursor = page.next_cursor;
      at.complete = page.complete;
      if (page.items.length) {
        const added = page.items.map((line) => ({ ...line, n: (at.n += 1) }));
        at.lines = [...at.lines, ...added];
        if (at.lines.length > MOST) {
          at.dropped += at.lines.length - MOST;
          at.lines = at.lines.slice(-MOST);
        }
      }
      if (page.items.length < PAGE || page.complete || at.lines.length <= PAGE) setState({ lines: at.lines, dropped: at.dropped, complete: page.complete, known: true, error: null });
      return page.complete;
    }, { every: 50, signal, onError: (error) => error?.status && setState((was) => ({ ...was, error })) });
  }, [jobId, rank, attempt]);
  return state;
}
