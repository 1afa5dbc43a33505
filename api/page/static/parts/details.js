// The part of the series into which the reader has zoomed.

import { useEffect, useState } from '../lib/html.js';
import { detail, stepsIn } from '../lib/series.js';

const NONE = {};

// The zoomed part of each job's series in full detail, by id. places: the axis of each job, by id. range: [from,
// to] on the axis, or null. keys: the metrics to read, by default all.
export function useDetails(places, series, range, keys = []) {
  const [found, setFound] = useState({ key: null, series: {} });
  const ids = Object.keys(series).filter((id) => places.get(id));
  const key = range && JSON.stringify([range, ids, keys]);
  useEffect(() => {
    if (!key) return undefined;
    const controller = new AbortController();
    const read = async () => {
      const all = {};
      for (const id of ids) {
        const newest = Math.max(0, ...Object.values(series[id]).map(({ steps }) => steps.at(-1)));
        const [from, to] = stepsIn(places.get(id), range, newest);
        if (from <= to) all[id] = await detail(id, 0, keys, from, to, controller.signal);
      }
      setFound({ key, series: all });
    };
    read().catch(() => {});
    return () => controller.abort();
  }, [key]);
  return key && found.key === key ? found.series : NONE;
}
