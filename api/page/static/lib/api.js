// Calls of the API.

import { asksForToken, authorization, credential } from './credentials.js';
import { Store } from './stores.js';

export { asksForToken, hasToken } from './credentials.js';

const BASE = new URL('.', document.baseURI);
const LOST = new Set([502, 503, 504]);
// Timeouts in milliseconds after which the server counts as lost, since it can hang without closing its
// connections. HEAD_MS limits the time until an answer begins, BODY_MS the time until it is complete.
const HEAD_MS = 15000;
const CHANGE_MS = 60000;
const BODY_MS = 60000;
// The server sends a comment every 5 s on an event stream.
const STREAM_MS = 15000;

// Whether the last call failed to reach the server, and `since` when.
export const connection = new Store({ lost: false, since: null });

// An error response of the server.
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the server answered ${status}`);
    Object.assign(this, { status, code: body.code, pointer: body.pointer, hint: body.hint });
  }
}

// The error for a server that has not answered.
export class Unreachable extends Error {}

export function urlOf(path, query = {}) {
  const url = new URL(path.replace(/^\//, ''), BASE);
  for (const [name, value] of Object.entries(query)) {
    for (const one of [].concat(value)) if (one !== undefined && one !== null && one !== '') url.searchParams.append(name, one);
  }
  return url;
}

function noticeAnswer() {
  if (connection.value.lost) connection.set({ lost: false, since: null });
}

function noticeSilence() {
  if (!connection.value.lost) connection.set({ lost: true, since: serverNow() });
}

// Whether the same call can succeed later.
export const mayPass = (error) => !(error.status < 500) || error.status === 408 || error.status === 429;

// Milliseconds by which the server's clock is ahead of the reader's. All times of jobs are the server's.
// A few seconds are ignored: answers have whole seconds, and take a while to arrive.
export const ahead = new Store(0);
const CLOSE_MS = 10000;
export const serverNow = () => Date.now() + ahead.value;

function noticeTime(response) {
  const off = Date.parse(response.headers.get('Date')) - Date.now();
  const wanted = Math.abs(off) > CLOSE_MS ? off : 0;
  if (Math.abs(wanted - ahead.value) > CLOSE_MS / 2) ahead.set(wanted);
}

// A signal that aborts when either of two signals aborts.
const either = (a, b) => (a && b ? AbortSignal.any([a, b]) : a ?? b);

// The result of `read` for the Response of a successful call; without `read`, the Response. Raises
// Problem, Unreachable, or AbortError if `signal` aborts.
export async function send(method, path, { query, body, headers = {}, signal, within = HEAD_MS, bodyWithin = BODY_MS, read } = {}) {
  const known = credential();
  const sent = { ...authorization(method), ...headers };
  if (body !== undefined) sent['Content-Type'] ??= 'application/json';
  const text = typeof body === 'string' || body === undefined ? body : JSON.stringify(body);
  const patience = new AbortController();
  const limit = (milliseconds) => setTimeout(() => patience.abort(), milliseconds);
  let timer = limit(within);
  try {
    const response = await fetch(urlOf(path, query), {
      method, headers: sent, body: text, signal: either(signal, patience.signal), credentials: 'same-origin', cache: 'no-cache', referrerPolicy: 'no-referrer',
    });
    clearTimeout(timer);
    noticeTime(response);
    if (response.ok && !read) {
      noticeAnswer();
      return response;
    }
    timer = limit(bodyWithin);
    if (!response.ok) throw await problemOf(response, known, signal);
    const found = await read(response);
    // Don't do this earlier: if the server cuts off its answers, each answer that begins would make all
    // other calls retry.
    noticeAnswer();
    return found;
  } catch (error) {
    if (error instanceof Problem || signal?.aborted) throw error;
    noticeSilence();
    throw new Unreachable('the server did not answer');
  } finally {
    clearTimeout(timer);
  }
}

async function problemOf(response, known, signal) {
  const problem = new Problem(response.status, await response.json().catch(() => ({})));
  // If reading the body was aborted, don't return this empty error: it would replace the message of another
  // error.
  if (signal?.aborted) return signal.reason;
  if (LOST.has(response.status) && problem.code !== 'storage_unavailable') noticeSilence();
  else noticeAnswer();
  // An answer to a call that was sent before the user entered a token is not about that token.
  if (response.status === 401 && known === credential()) asksForToken.set(problem.message);
  return problem;
}

const parsed = (response) => (response.status === 204 ? null : response.json());

export const get = (path, query, signal) =>
  send('GET', path, { query, signal, within: HEAD_MS + 1000 * (query?.wait_s ?? 0), read: parsed });
// The text of an answer that can take long.
export const getText = (path, query) => send('GET', path, { query, within: CHANGE_MS, read: (response) => response.text() });
export const change = (method, path, body, query, headers) =>
  send(method, path, { body, query, headers, within: CHANGE_MS, read: parsed });

// Follow the events of a job until it has ended or `signal` aborts: `onEvent(event)` for each, once
// and in order, over any number of connections.
export async function followEvents(jobId, afterSeq, onEvent, signal) {
  let last = afterSeq;
  for (;;) {
    try {
      const headers = { Accept: 'text/event-stream', 'Last-Event-ID': String(last) };
      const response = await send('GET', `v1/jobs/${jobId}/events`, { headers, signal });
      if (response.status === 204) return;
      for await (const frame of frames(response.body)) {
        if (frame.event === 'reset') last = 0;
        else if (frame.data) {
          const event = JSON.parse(frame.data);
          if (event.seq > last) {
            last = event.seq;
            onEvent(event);
          }
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!mayPass(error)) throw error;
    }
    await pause(1000, signal);
    if (signal.aborted) return;
  }
}

// The frames of an event stream.
async function* frames(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const silent = setTimeout(() => reader.cancel().catch(() => {}), STREAM_MS);
      const { value, done } = await reader.read();
      clearTimeout(silent);
      if (done) return;
      const parts = (rest + value).split('\n\n');
      rest = parts.pop();
      for (const part of parts) {
        const frame = {};
        for (const line of part.split('\n')) {
          const at = line.indexOf(': ');
          if (at > 0) frame[line.slice(0, at)] = line.slice(at + 2);
        }
        yield frame;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener('abort', () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

// Save a file of a job: {artifact: id}, {checkpoint: {step, path}} or {log: {rank, attempt}}. The
// browser fetches the file, whatever its size, from a link that works once, because a link must not
// contain the token. Raises Problem.
export async function download(jobId, wanted) {
  const { url } = await change('POST', `v1/jobs/${jobId}/downloads`, wanted);
  const anchor = document.createElement('a');
  anchor.download = '';
  anchor.href = urlOf(url);
  anchor.click();
}
