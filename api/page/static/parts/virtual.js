// Virtual scrolling: only the rows in view are in the document.

import { useEffect, useLayoutEffect, useState } from '../lib/html.js';

const SPARE = 8;

// The rows in view, from `first` to `last` (exclusive) of `count`, in an element that scrolls itself or,
// with `inWindow`, with the window. `above` and `below` are the heights of the omitted rows. If the rows have
// different heights, `offsets` has the position of each row and the height of all.
export function useVirtual(element, count, rowHeight, inWindow = false, offsets = null) {
  const [view, setView] = useState({ top: 0, height: 900 });
  useLayoutEffect(() => {
    const box = element.current;
    if (!box) return undefined;
    const source = inWindow ? window : box;
    const measure = () => {
      const top = inWindow ? Math.max(0, -box.getBoundingClientRect().top) : box.scrollTop;
      const height = inWindow ? innerHeight : box.clientHeight;
      setView((was) => (Math.abs(was.top - top) < rowHeight / 2 && was.height === height ? was : { top, height }));
    };
    measure();
    source.addEventListener('scroll', measure, { passive: true });
    addEventListener('resize', measure);
    const watch = new ResizeObserver(measure);
    watch.observe(box);
    return () => {
      watch.disconnect();
      source.removeEventListener('scroll', measure);
      removeEventListener('resize', measure);
    };
  }, [rowHeight, inWindow, element.current]);
  if (offsets) {
    const first = Math.max(0, rowAt(offsets, view.top) - SPARE);
    const last = Math.min(count, rowAt(offsets, view.top + view.height) + 1 + SPARE);
    return { first, last, above: offsets[first], below: offsets[count] - offsets[last] };
  }
  const first = Math.max(0, Math.min(count, Math.floor(view.top / rowHeight) - SPARE));
  const last = Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + SPARE);
  return { first, last, above: first * rowHeight, below: Math.max(0, count - last) * rowHeight };
}

// The index of the row at this position.
function rowAt(offsets, top) {
  let [low, high] = [0, offsets.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (offsets[middle] <= top) low = middle;
    else high = middle;
  }
  return low;
}

// Whether the element has been in or near the viewport.
export function useSeen(element) {
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => { if (entry.isIntersecting) setSeen(true); }, { rootMargin: '300px' });
    watch.observe(element.current);
    return () => watch.disconnect();
  }, []);
  return seen;
}

export function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const changed = () => setMatches(media.matches);
    media.addEventListener('change', changed);
    return () => media.removeEventListener('change', changed);
  }, [query]);
  return matches;
}
