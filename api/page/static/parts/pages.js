// Lists that the API returns in pages.

import { get } from '../lib/api.js';
import { html, useState } from '../lib/html.js';
import { usePoll } from '../lib/live.js';

const PAGE = 50;
const EVERY_MS = 10000;

// The pages of a list: {items, error, more, refresh}; `more` is set if there are further items.
export function usePages(path) {
  const first = usePoll(path, { limit: PAGE }, EVERY_MS);
  const [rest, setRest] = useState({ items: [], cursor: null, path });
  const [error, setError] = useState(null);
  const { items, cursor } = rest.path === path && rest.cursor !== null ? rest : { items: [], cursor: first.data?.next_cursor };
  const more = cursor && (() => get(path, { limit: PAGE, cursor }).then((page) => {
    setRest({ items: [...items, ...page.items], cursor: page.next_cursor ?? '', path });
    setError(null);
  }, setError));
  return { items: first.data && [...first.data.items, ...items], error: error ?? first.error, more, refresh: first.refresh };
}

export const More = ({ more }) => more && html`<p><button onClick=${more}>Show more</button></p>`;
