// What the charts of runs share: the run that the reader points at, the width of the chart, and texts.

import { go } from '../lib/address.js';
import { pointed } from '../lib/colours.js';
import { html, useEffect, useState } from '../lib/html.js';
import { useStore } from '../lib/stores.js';
import { toJob, valueText } from './job_parts.js';

export function short(value) {
  const shown = valueText(value);
  return shown.length > 12 ? `${shown.slice(0, 11)}…` : shown;
}

export function useWidth(box, most = 900) {
  const [width, setWidth] = useState(most);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(entry.contentRect.width));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return width;
}

// One run at a time is highlighted, by the pointer or the arrow keys, here and in the other charts and tables.
// runs: [{id}] in the order of the arrow keys. Enter opens a run.
export function useHighlight(runs, box) {
  const [at, setAt] = useState(0);
  const [isPointed, setIsPointed] = useState(false);
  const pointedId = useStore(pointed);
  const current = Math.max(0, Math.min(at, runs.length - 1));
  useEffect(() => {
    const n = runs.findIndex(({ id }) => id === pointedId);
    if (n < 0) return;
    setAt(n);
    setIsPointed(true);
  }, [pointedId]);
  const point = (n, focus) => {
    pointed.set(runs[n].id);
    setAt(n);
    setIsPointed(true);
    if (focus) box.current.querySelector(`[data-n="${n}"]`)?.focus();
  };
  const move = (event) => {
    const to = { ArrowDown: current + 1, ArrowRight: current + 1, ArrowUp: current - 1, ArrowLeft: current - 1, Home: 0, End: runs.length - 1 }[event.key];
    if (event.key === 'Enter') go(['jobs', runs[current].id]);
    if (to === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(runs.length - 1, to)), true);
  };
  // The attributes of the element of a run.
  const option = (n, label) => ({
    role: 'option', 'data-n': n, 'aria-selected': n === current, 'aria-posinset': n + 1, 'aria-setsize': runs.length, tabindex: n === current ? 0 : -1, 'aria-label': label,
    onPointerEnter: () => point(n), onPointerLeave: () => pointed.set(null), onFocus: () => point(n), onClick: () => point(n, true),
  });
  return { current, isPointed: isPointed && runs.length > 0, move, option };
}

export const describe = (run, names) => names.map((name) => `${name} ${valueText(run.values[name])}`).join(', ');

export const Described = ({ run, names, hint }) => html`<p class="soft">${run ? html`<a href=${toJob(run.id)}>${run.title}</a> <span class="numeric">${run.state}: ${describe(run, names)}</span>` : hint}</p>`;
