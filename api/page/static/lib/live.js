// Keeps the page up to date with polls, which pause while the page is hidden, and catch up afterwards.

import { ahead, connection, get, pause, serverNow } from './api.js';
import { useCallback, useEffect, useRef, useState } from './html.js';
import { useStore } from './stores.js';

const RETRY_MS = [1000, 2000, 4000, 5000];
const SOONEST_MS = 1000;

// The polling period for a value that changed at `since`, a time of the server's clock. The period is short
// after a change, when another change is likely, and grows up to `most`. If clocks differ, `since` can be
// in the future.
export const pace = (since, most) => Math.min(most, Math.max(SOONEST_MS, Math.abs(serverNow() - since) / 2));

// Resolves once the page is visible.
function looked(signal) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const done = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener('visibilitychange', done);
      resolve();
    };
    document.addEventListener('visibilitychange', done);
    signal.addEventListener('abort', done, { once: true });
  });
}

const periodOf = (every, found) => (typeof every === 'function' ? every(found) : every);

// Call `look(signal)` repeatedly until aborted or until it returns true: every `every` ms, which may be
// a function; sooner after a failure and when the server is back. Errors go to `onError`.
export async function repeat(look, { every, signal, onError, wake }) {
  let failures = 0;
  while (!signal.aborted) {
    await looked(signal);
    if (signal.aborted) return;
    let wait;
    try {
      if (await look(signal)) return;
      wait = periodOf(every);
      failures = 0;
      if (!signal.aborted) onError?.(null);
    } catch (error) {
      if (signal.aborted) return;
      onError?.(error);
      wait = error.status && error.status < 500 ? Math.max(periodOf(every), 5000) : RETRY_MS[Math.min(failures, 3)];
      failures += 1;
    }
    await rest(wait, signal, wake);
  }
}

// Wait until `wake` fires, the server is back, or the time is up.
async function rest(milliseconds, signal, wake) {
  const early = new AbortController();
  const stop = () => early.abort();
  signal.addEventListener('abort', stop, { once: true });
  const before = connection.value.lost;
  const unsubscribe = connection.subscribe((now) => { if (before && !now.lost) stop(); });
  if (wake) wake.current = stop;
  await pause(milliseconds, early.signal);
  unsubscribe();
  signal.removeEventListener('abort', stop);
}

// Poll a GET: {data, error, refresh}. `every` is the period in ms, or a function of the newest answer;
// 0 calls once. The last answer is kept while the server is away.
export function usePoll(path, query, every = 3000) {
  const [state, setState] = useState({ data: null, error: null, key: null });
  const wake = useRef(null);
  const period = useRef(null);
  period.current = every;
  const isOnce = every === 0;
  const key = path && JSON.stringify([path, query]);
  useEffect(() => {
    if (!key) return undefined;
    const controller = new AbortController();
    const { signal } = controller;
    let data = null;
    repeat(
      async () => {
        data = await get(path, query, signal);
        if (!signal.aborted) setState({ data, error: null, key });
        return isOnce;
      },
      {
        every: () => periodOf(period.current, data),
        signal,
        wake,
        onError: (error) => error && setState((was) => ({ data: was.key === key ? was.data : null, error, key })),
      },
    );
    return () => controller.abort();
  }, [key, isOnce]);
  const refresh = useCallback(() => wake.current?.(), []);
  const current = state.key === key ? state : { data: null, error: null };
  return { data: current.data, error: current.error, refresh };
}

// The server's current time, for relative times. It advances while the page is visible.
export function useNow(every = 1000) {
  const [now, setNow] = useState(Date.now());
  const off = useStore(ahead);
  useEffect(() => {
    const timer = setInterval(() => { if (!document.hidden) setNow(Date.now()); }, every);
    return () => clearInterval(timer);
  }, [every]);
  return now + off;
}

// An effect that runs while the page is visible and `on` is true, with a signal that aborts it.
export function useWhileLooked(effect, dependencies, on = true) {
  useEffect(() => {
    if (!on) return undefined;
    let controller = null;
    const turn = () => {
      if (document.hidden) {
        controller?.abort();
        controller = null;
      } else if (!controller) {
        controller = new AbortController();
        effect(controller.signal);
      }
    };
    turn();
    document.addEventListener('visibilitychange', turn);
    return () => {
      document.removeEventListener('visibilitychange', turn);
      controller?.abort();
    };
  }, [...dependencies, on]);
}
