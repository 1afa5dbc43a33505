// The editor of a report, with a preview. The server divides the text into parts while the user types.

import { go } from '../../lib/address.js';
import { change, get, mayPass } from '../../lib/api.js';
import { html, useEffect, useRef, useState } from '../../lib/html.js';
import { Failure } from '../../parts/common.js';
import { Parts } from './blocks.js';
import { DRAFTS } from './drafts.js';

const CHECK_AFTER_MS = 400;
const RETRY_MS = 3000;
const MAX_TEXT = 65536;

// before: the stored report, or null for a new one.
export function ReportEditor({ before }) {
  const key = before?.id ?? 'new';
  const [draft, setDraft] = useState(() => DRAFTS.read(key) ?? { title: before?.title ?? '', text: before?.text ?? '', version: before?.version ?? null });
  const [other, setOther] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const { parts, problem } = usePreview(draft.text);
  const box = useRef(null);
  const edit = (changes) => setDraft((was) => ({ ...was, ...changes }));
  useEffect(() => { document.title = `${before?.title ?? 'New report'} - dray`; }, [before?.title]);
  useEffect(() => {
    const isSame = before ? draft.title === before.title && draft.text === before.text : !draft.title && !draft.text;
    if (isSame) DRAFTS.remove(key);
    else DRAFTS.write(key, draft);
  }, [key, draft]);
  const line = Number(/^line (\d+):/.exec(problem?.message ?? '')?.[1]) || null;
  const leave = (id) => {
    DRAFTS.remove(key);
    go(id ? ['reports', id] : ['reports']);
  };
  const save = async () => {
    setBusy(true);
    setError(null);
    const { title, text, version } = draft;
    try {
      const found = before ? await change('PATCH', `v1/reports/${before.id}`, { version, title, text }) : await change('POST', 'v1/reports', { title, text });
      leave(found.id);
    } catch (raised) {
      setError(raised);
      if (raised.code === 'report_changed') setOther(await get(`v1/reports/${before.id}`).catch(() => null));
    } finally {
      setBusy(false);
    }
  };
  const show = () => {
    const start = draft.text.split('\n').slice(0, line - 1).join('\n').length + (line > 1 ? 1 : 0);
    box.current.focus();
    box.current.setSelectionRange(start, draft.text.indexOf('\n', start) < 0 ? draft.text.length : draft.text.indexOf('\n', start));
  };
  return html`<section aria-labelledby="title"><header class="head"><h1 id="title">${before ? 'Edit the report' : 'New report'}</h1>
      <span class="buttons"><button class="primary" disabled=${busy || !draft.title.trim() || Boolean(problem) || Boolean(other)} onClick=${save}>Save</button>
      <button onClick=${() => leave(before?.id)}>Discard changes</button></span></header>
    <${Failure} error=${error} />
    ${other && html`<div class="failure" role="status"><strong>${other.updated_by} has changed the report in the meantime:</strong><p class="source">${other.title}\n\n${other.text}</p>
      <button onClick=${() => { edit({ version: other.version }); setOther(null); setError(null); }}>Replace it with mine</button></div>`}
    <div class="submit writing"><div><p><label>Title <input class="title" maxlength="300" value=${draft.title} onInput=${(event) => edit({ title: event.target.value })} /></label></p>
      <div class="editor"><textarea ref=${box} value=${draft.text} maxlength=${MAX_TEXT} aria-label="Text, in Markdown" aria-invalid=${Boolean(line)} onInput=${(event) => edit({ text: event.target.value })}></textarea></div>
      ${problem && html`<div class="verdict wrong" role="status"><p>${problem.message}</p>${problem.hint && html`<p class="soft">${problem.hint}</p>`}${line && html`<p><button onClick=${show}>Show the line</button></p>`}</div>`}
      <p class="soft">The text is Markdown. A block <code>${'```chart'}</code> is a chart, and a block <code>${'```table'}</code> a table of runs. <a href="manual/guides/reports.html" target="_blank" rel="noopener">Their fields</a></p></div>
      <div class="preview" role="region" aria-label="Preview" tabindex="0">${parts && html`<${Parts} parts=${parts} />`}</div></div></section>`;
}

// The parts of the text as the server divides it: {parts, problem}. The last valid parts are kept.
function usePreview(text) {
  const [found, setFound] = useState({ parts: null, problem: null });
  useEffect(() => {
    let isOld = false;
    const check = async () => {
      try {
        const { parts } = await change('POST', 'v1/reports/preview', { title: 'preview', text });
        if (!isOld) setFound({ parts, problem: null });
      } catch (problem) {
        if (isOld) return;
        setFound((was) => ({ ...was, problem }));
        if (mayPass(problem)) timer = setTimeout(check, RETRY_MS);
      }
    };
    let timer = setTimeout(check, found.parts ? CHECK_AFTER_MS : 0);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [text]);
  return found;
}
