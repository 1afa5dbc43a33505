// The output of a job's ranks: drawn as in a terminal, in colour, searched by the server, and followed.

import { address, adjust } from '../../lib/address.js';
import { download, get } from '../../lib/api.js';
import { pieces, plain } from '../../lib/ansi.js';
import { clock, exactly, number, plural } from '../../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { repeat, useWhileLooked } from '../../lib/live.js';
import { useStore } from '../../lib/stores.js';
import { Terminal } from '../../lib/terminal.js';
import { rankName } from '../../lib/topology.js';
import { Empty, Failure, Loading } from '../../parts/common.js';
import { useMedia, useVirtual } from '../../parts/virtual.js';
import { keyOf, useFailureLine } from './failure_line.js';
import { MOST_SIDES, SideLogs, sidesIn } from './side_logs.js';

const LINE = 19;
const PAGE = 5000;
const MOST = 200000;
const WIDEST = 4000;
const MOST_HITS = 10000;
const SEARCH_AGAIN_MS = 5000;
const TYPING_MS = 300;

export function Logs({ job, events }) {
  const { params } = useStore(address);
  const isNarrow = useMedia('(max-width: 46rem)');
  const sides = sidesIn(params, job.world_size);
  const isSides = sides.length > 1;
  const rank = isSides ? '' : params.get('rank') || '';
  const attempt = params.get('attempt') || '';
  const text = params.get('find') || '';
  const target = params.get('line') || '';
  const wrap = (params.get('wrap') ?? (isNarrow || isSides ? '1' : '0')) === '1';
  const withTimes = (params.get('times') ?? (isNarrow ? '0' : '1')) === '1';
  const [alone, setAlone] = useState(false);
  const [follow, setFollow] = useState(!target);
  const { lines, dropped, complete, known, error } = useLines(job.id, rank, attempt);
  const { hits: all, searched, tooMany, refusal } = useHits(job.id, text, rank, attempt);
  const hits = isSides ? all.filter((line) => sides.includes(line.rank)) : all;
  const failure = useFailureLine(job, events);
  const [refused, setRefused] = useState(null);
  const log = { rank: rank ? Number(rank) : null, attempt: attempt ? Number(attempt) : null };
  const save = () => download(job.id, { log }).then(() => setRefused(null), setRefused);
  const shown = alone && text ? hits : lines;
  const places = useMemo(() => new Map(shown.map((line, i) => [keyOf(line), i])), [shown]);
  const fromOf = (line) => [withTimes && clock(line.time), job.attempt > 1 && !attempt && `${line.attempt}:`, !rank && String(line.rank).padStart(String(job.world_size - 1).length)].filter(Boolean).join(' ').replace(': ', ':');
  const fromWidth = shown.length ? Math.max(fromOf(shown[0]).length, fromOf(shown.at(-1)).length) : 0;
  const box = useRef(null);
  const probe = useRef(null);
  const columns = useColumns(box, probe, wrap, fromWidth);
  const offsets = useMemo(() => (wrap ? offsetsOf(shown, columns) : null), [shown, wrap, columns]);
  const { first, last, above, below } = useVirtual(box, shown.length, LINE, false, offsets);
  const [marked, setMarked] = useState(target);
  const [missing, setMissing] = useState(false);
  const [numShown, setNumShown] = useState(0);
  const at = hits.findIndex((one) => keyOf(one) === marked);
  const show = (key) => {
    setMarked(key);
    const index = places.get(key);
    setMissing(index === undefined);
    if (index === undefined) return;
    setFollow(false);
    setNumShown((n) => n + 1);
    if (isSides) return;
    box.current.scrollTop = (offsets ? offsets[index] : index * LINE) - box.current.clientHeight / 2;
  };
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown, follow, offsets]);
  // The address names a line: show it as soon as it has been loaded.
  const awaited = useRef(target);
  useEffect(() => { awaited.current = target; }, [target]);
  useEffect(() => {
    if (!awaited.current || !(places.has(awaited.current) || complete)) return;
    show(awaited.current);
    awaited.current = '';
  }, [places, target, complete]);
  const jump = (step) => {
    if (!hits.length) return;
    show(keyOf(hits[at < 0 ? (step < 0 ? hits.length - 1 : 0) : (at + step + hits.length) % hits.length]));
  };
  const scrolled = (event) => { // the event can arrive after the box was removed from the page
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    if (follow && scrollHeight - scrollTop - clientHeight > 3 * LINE) setFollow(false);
  };
  const showSides = (ranks) => adjust(ranks.length > 1 ? { side: ranks.join(), rank: '' } : { side: '', rank: String(ranks[0]) });
  const sidesNow = isSides ? sides : [rank ? Number(rank) : 0];
  const ranks = Array.from({ length: job.world_size }, (_, n) => n);
  const attempts = Array.from({ length: job.attempt }, (_, n) => n + 1);
  const found = `${tooMany ? 'more than ' : ''}${plural(hits.length, 'hit')}`;
  return html`<div class="toolbar">
      <select aria-label="Rank" value=${rank} onChange=${(event) => adjust({ rank: event.target.value, side: '' })}><option value="">${isSides ? 'several ranks' : 'all ranks'}</option>${ranks.map((n) => html`<option key=${n} value=${n}>${rankName(job.spec, n)}</option>`)}</select>
      ${job.world_size > 1 && sides.length < MOST_SIDES && html`<select aria-label="Add a rank side by side" value="" onChange=${(event) => event.target.value && showSides([...sidesNow, Number(event.target.value)])}><option value="">side by side with …</option>${ranks.filter((n) => !sidesNow.includes(n)).map((n) => html`<option key=${n} value=${n}>${rankName(job.spec, n)}</option>`)}</select>`}
      ${isSides && html`<button onClick=${() => adjust({ side: '' })}>All ranks in one column</button>`}
      <select aria-label="Attempt" value=${attempt} onChange=${(event) => adjust({ attempt: event.target.value })}><option value="">all attempts</option>${attempts.map((n) => html`<option key=${n} value=${n}>attempt ${n}</option>`)}</select>
      <input type="search" placeholder="search" maxlength="1000" aria-label="Search the log; Enter goes to the next match" value=${text} onInput=${(event) => adjust({ find: event.target.value }, true)}
        onKeyDown=${(event) => event.key === 'Enter' && jump(event.shiftKey ? -1 : 1)} />
      ${text && html`<span role="status" class="soft">${hits.length ? `${at >= 0 ? `${number(at + 1)} of ` : ''}${found}` : searched ? 'no hit' : ''}${searched ? '' : ' searching …'}</span>
        <button aria-label="Previous hit" onClick=${() => jump(-1)}>↑</button><button aria-label="Next hit" onClick=${() => jump(1)}>↓</button>
        <label><input type="checkbox" checked=${alone} onChange=${(event) => setAlone(event.target.checked)} /> only hits</label>`}
      ${failure?.line && html`<button class="danger" onClick=${() => (places.has(keyOf(failure.line)) && (!isSides || sides.includes(failure.line.rank)) ? show(keyOf(failure.line)) : adjust({ rank: '', side: '', attempt: '', line: keyOf(failure.line) }))}>Go to the error</button>`}
      <label><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} /> follow</label>
      <label><input type="checkbox" checked=${wrap} onChange=${(event) => adjust({ wrap: event.target.checked ? '1' : '0' })} /> wrap</label>
      <label><input type="checkbox" checked=${withTimes} onChange=${(event) => adjust({ times: event.target.checked ? '1' : '0' })} /> times</label>
      <span class="soft">${plural(lines.length, 'line')}${complete ? '' : ', more may follow'}</span>
      <button aria-label="Download the log" onClick=${save}>Download</button>
    </div>
    <${Failure} error=${error ?? refusal ?? refused} />
    ${missing && html`<p class="note" role="status">This line is not among the lines shown here: it has been drawn over, or it belongs to another rank or attempt, or to the part that is not loaded. “Only hits” shows each line that was found.</p>`}
    ${dropped > 0 && html`<p class="note">The first ${plural(dropped, 'line')} are not shown; the search and the download have all lines.</p>`}
    ${isSides && known && lines.length > 0 && html`<${SideLogs} isNarrow=${isNarrow} spec=${job.spec} lines=${shown} ranks=${sides} wrap=${wrap} withTimes=${withTimes} follow=${follow} onLeave=${() => setFollow(false)}
      shown=${{ key: marked, n: numShown }} onRemove=${(one) => showSides(sides.filter((other) => other !== one))} cut=${cut} />`}
    <div class=${wrap ? 'log wraps' : 'log'} hidden=${isSides && known && lines.length > 0} ref=${box} tabindex="0" role="log" aria-label="Output" aria-live="off" onScroll=${scrolled}>
      <span class="probe" ref=${probe} aria-hidden="true">${'0'.repeat(100)}</span>
      ${!known && !error && html`<${Loading} />`}
      ${known && !lines.length && html`<${Empty}>${complete ? 'There is no output.' : 'No output yet.'}<//>`}
      <div class="lines">
        <div style=${{ height: `${above}px` }}></div>
        ${shown.slice(first, last).map((line) => html`<${Line} key=${line.n ?? keyOf(line)} spec=${job.spec} line=${line} text=${line.text} isHit=${marked === keyOf(line)} from=${fromOf(line)} width=${fromWidth} />`)}
        <div style=${{ height: `${below}px` }}></div>
      </div></div>`;
}

const cut = (text) => (text.length > WIDEST ? `${text.slice(0, WIDEST)} …` : text);

function Line({ spec, line, isHit, from, width }) {
  return html`<div class=${isHit ? 'line hit' : 'line'} aria-current=${isHit ? 'true' : undefined}>
    ${width > 0 && html`<span class=${`from colour-${line.rank % 8}`} style=${{ width: `${width}ch` }} title=${`attempt ${line.attempt}, ${rankName(spec, line.rank)}, line ${line.number + 1}, ${exactly(line.time)}`}><span>${from}</span></span>`}<span class="text">${
      pieces(cut(line.text)).map(({ text: piece, className }) => (className ? html`<span class=${className}>${piece}</span>` : piece))}</span></div>`;
}

// The number of characters in a wrapped row.
function useColumns(box, probe, wrap, fromWidth) {
  const [size, setSize] = useState({ width: 900, character: 7.5 });
  useEffect(() => {
    if (!wrap) return undefined;
    const watch = new ResizeObserver(() => setSize({ width: box.current.clientWidth, character: probe.current.getBoundingClientRect().width / 100 }));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, [wrap]);
  const used = fromWidth ? fromWidth * size.character + 14 : 0; // the margin of .from
  return Math.max(8, Math.floor((size.width - 26 - used) / size.character)); // the padding of .line
}

// The position of each line in pixels if lines wrap, and the height of all.
function offsetsOf(lines, columns) {
  const offsets = new Float64Array(lines.length + 1);
  lines.forEach((line, i) => {
    line.width ??= plain(cut(line.text)).length;
    offsets[i + 1] = offsets[i] + LINE * Math.max(1, Math.ceil(line.width / columns));
  });
  return offsets;
}

// All lines that the server finds, in the whole log.
function useHits(jobId, text, rank, attempt) {
  const none = { hits: [], searched: !text, tooMany: false, refusal: null };
  const [state, setState] = useState(none);
  const place = useRef({});
  useEffect(() => {
    place.current = { cursor: null, hits: [], searched: false };
    setState(none);
  }, [jobId, text, rank, attempt]);
  useWhileLooked((signal) => {
    const at = place.current;
    const look = async () => {
      const page = await get(`v1/jobs/${jobId}/logs`, { contains: text, rank, attempt, cursor: at.cursor }, signal);
      if (signal.aborted || at !== place.current) return true;
      at.searched = page.complete || page.next_cursor === at.cursor;
      at.cursor = page.next_cursor;
      if (page.items.length) at.hits = [...at.hits, ...page.items].slice(0, MOST_HITS);
      const tooMany = at.hits.length === MOST_HITS;
      setState({ hits: at.hits, searched: at.searched || tooMany, tooMany, refusal: null });
      return page.complete || tooMany;
    };
    const typed = setTimeout(() => repeat(look, {
      every: () => (at.searched ? SEARCH_AGAIN_MS : 0), signal, onError: (error) => error?.status && setState((was) => ({ ...was, searched: true, refusal: error })),
    }), TYPING_MS);
    signal.addEventListener('abort', () => clearTimeout(typed), { once: true });
  }, [jobId, text, rank, attempt], Boolean(text));
  return state;
}

// All lines so far, and new lines by long polls while the page is visible.
function useLines(jobId, rank, attempt) {
  const empty = { lines: [], dropped: 0, complete: false, known: false, error: null };
  const [state, setState] = useState(empty);
  const place = useRef({});
  useEffect(() => {
    place.current = { cursor: null, n: 0, complete: false, dropped: 0, lines: [], terminals: new Map() };
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
        at.lines = [...at.lines, ...drawnBy(page.items, at)];
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

// The lines that these lines add; lines that they draw over are changed.
function drawnBy(items, at) {
  const all = [];
  for (const item of items) {
    const rank = `${item.attempt}.${item.rank}`;
    if (!at.terminals.has(rank)) at.terminals.set(rank, new Terminal());
    const { added, changed } = at.terminals.get(rank).write(item);
    for (const line of changed) line.width = undefined;
    for (const line of added) {
      line.n = at.n += 1;
      all.push(line);
    }
  }
  return all;
}
