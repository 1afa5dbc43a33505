// Virtual scrolling: only the rows in view are in the document.

import { useEffect, useLayoutEffect, useState } from '../lib/html.js';

const SPARE = 8;

// The rows in view, from `first` to `last` (exclusive) of `count`, in an element that scrolls itself or,
// with `inWindow`, with the window. `above` and `below` are the heights of the omitted rows.
export function useVirtual(element, count, rowHeight, inWindow = false) {
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
    return () => {
      source.removeEventListener('scroll', measure);
      removeEventListener('resize', measure);
    };
  }, [rowHeight, inWindow, element.current]);
  const first = Math.max(0, Math.min(count, Math.floor(view.top / rowHeight) - SPARE));
  const last = Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + SPARE);
  return { first, last, above: first * rowHeight, below: Math.max(0, count - last) * rowHeight };
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
