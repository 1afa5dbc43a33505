// Submit a job: an editor for its document, which the server checks while the user types.

import { address, go } from '../lib/address.js';
import { change, get, mayPass, serverNow } from '../lib/api.js';
import { bytes, clock, duration, plural, range } from '../lib/format.js';
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../lib/html.js';
import { lineAt, lineOf, openAt, placeOf } from '../lib/json_places.js';
import { repeat, usePoll } from '../lib/live.js';
import { fieldsAt, withoutDefaults } from '../lib/schema.js';
import { useStore } from '../lib/stores.js';
import { Failure } from '../parts/common.js';
import { isJobId } from '../parts/job_parts.js';

const DRAFT = 'dray.draft';
const CHECK_AFTER_MS = 400;
const RETRY_MS = 3000;
// The code of the reason of a job that the cluster could not run even if it were empty.
const NEVER = 'unsatisfiable';
const FIRST = { name: 'digits', recipe: 'image_classification', data: { source: 'sklearn://digits' }, train: { epochs: 4 }, resources: { num_workers: 2 } };
// A document that begins with a brace is JSON, any other document is YAML.
const isJson = (text) => /^\s*\{/.test(text);
const typeOf = (text) => ({ 'Content-Type': isJson(text) ? 'application/json' : 'application/yaml' });
const written = (document) => `${JSON.stringify(document, null, 2)}\n`;

export function SubmitPage() {
  const { params } = useStore(address);
  const from = isJobId(params.get('from') ?? '') ? params.get('from') : null;
  const [text, setText] = useState(() => (from ? '' : sessionStorage.getItem(DRAFT) ?? written(FIRST)));
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const schema = usePoll('v1/schema', {}, 0).data;
  const templates = useTemplates();
  const verdict = useVerdict(text);
  const editor = useRef(null);
  const key = useMemo(() => crypto.randomUUID?.() ?? String(Math.random()), [text]);

  useEffect(() => {
    if (!from) return undefined;
    const controller = new AbortController();
    repeat(async (signal) => {
      const [job, root] = await Promise.all([get(`v1/jobs/${from}`, {}, signal), get('v1/schema', {}, signal)]);
      const document = withoutDefaults(job.spec, root);
      setText(written({ ...document, origin: { ...document.origin, job: from } }));
      setError(null);
      return true;
    }, { every: RETRY_MS, signal: controller.signal, onError: setError });
    return () => controller.abort();
  }, [from]);
  useEffect(() => { if (text) sessionStorage.setItem(DRAFT, text); }, [text]);

  const submit = async () => {
    setBusy(true);
    setError(null);
    try {
      const job = await change('POST', 'v1/jobs', text, {}, { 'Idempotency-Key': key, ...typeOf(text) });
      sessionStorage.removeItem(DRAFT);
      go(['jobs', job.id]);
    } catch (raised) {
      setError(raised);
    } finally {
      setBusy(false);
    }
  };
  const ofServer = /\(line (\d+), column \d+\)/.exec(verdict.problem?.message ?? '')?.[1]; // in YAML
  const wrong = !verdict.problem ? null : ofServer ? lineAt(text, Number(ofServer)) : isJson(text) ? placeOf(text, verdict.problem.pointer) : null;
  const wrongLine = verdict.line ?? (ofServer ? Number(ofServer) : null) ?? (wrong && verdict.problem.pointer ? lineOf(text, wrong.start) : null);
  return html`<section aria-labelledby="title">
    <header class="head"><h1 id="title">${from ? 'Edit and resubmit' : 'Submit a job'}</h1>
      <label class="soft">Template <select value="" onChange=${(event) => { if (event.target.value) setText(written(templates[event.target.value])); event.target.value = ''; }}>
        <option value="">choose …</option>${Object.keys(templates).map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
      <button class="primary button" disabled=${busy || !verdict.explanation} onClick=${submit}>Submit</button></header>
    <${Failure} error=${error} />
    <div class="submit">
      <${Editor} text=${text} setText=${setText} wrongLine=${wrongLine} schema=${schema} element=${editor} />
      <div><${Verdict} verdict=${verdict} line=${wrongLine} show=${() => {
        if (!wrong) return;
        editor.current.focus();
        editor.current.setSelectionRange(wrong.start, wrong.end);
      }} />
      <p class="soft">The document is JSON or YAML. In JSON, Ctrl+Space shows the fields that are allowed at the cursor. <a href="docs" target="_blank" rel="noopener">All fields</a></p></div>
    </div></section>`;
}

function useTemplates() {
  const [found, setFound] = useState({});
  useEffect(() => {
    fetch(new URL('../examples.json', import.meta.url)).then((response) => (response.ok ? response.json() : {})).then(setFound, () => {});
  }, []);
  return found;
}

// The server's verdict on the document: {explanation, plan}, {problem}, {line, message} if the text is
// not JSON, or {} while it is being checked.
function useVerdict(text) {
  const [verdict, setVerdict] = useState({});
  useEffect(() => {
    setVerdict((was) => (was.message ? {} : was));
    if (!text.trim()) return undefined;
    let isOld = false;
    const check = async () => {
      if (isJson(text)) {
        try {
          JSON.parse(text);
        } catch (error) {
          const position = /position (\d+)/.exec(error.message);
          setVerdict({ message: error.message, line: position ? lineOf(text, Number(position[1])) : null });
          return;
        }
      }
      try {
        const explanation = await change('POST', 'v1/jobs', text, { dry_run: true }, typeOf(text));
        if (!isOld) setVerdict({ explanation });
        // The model of a script is unknown before the script runs.
        const plan = /^\s*["']?recipe["']?\s*:/m.test(text) && await change('POST', 'v1/plan', text, {}, typeOf(text)).catch(() => null);
        if (!isOld && plan) setVerdict({ explanation, plan });
      } catch (problem) {
        if (isOld) return;
        setVerdict({ problem });
        if (mayPass(problem)) timer = setTimeout(check, RETRY_MS);
      }
    };
    let timer = setTimeout(check, CHECK_AFTER_MS);
    return () => {
      isOld = true;
      clearTimeout(timer);
    };
  }, [text]);
  return verdict;
}

function Verdict({ verdict, line, show }) {
  const { explanation, plan, problem, message } = verdict;
  if (message) return html`<div class="verdict wrong" role="status"><h2>This is not JSON yet</h2><p>${message}</p></div>`;
  if (problem) {
    return html`<div class="verdict wrong" role="status"><h2>${problem.pointer ? html`<code>${problem.pointer}</code>${line ? `, line ${line}` : ''}` : mayPass(problem) ? 'It can\'t be checked at the moment' : 'Invalid'}</h2>
      <p>${problem.message}</p>${problem.hint && html`<p class="soft">${problem.hint}</p>`}${(problem.pointer || line) && html`<p><button onClick=${show}>Show the position</button></p>`}</div>`;
  }
  if (!explanation) return html`<div class="verdict" role="status"><p class="soft">Checking …</p></div>`;
  const { start } = explanation;
  const never = [explanation.reason, start?.reason].some((one) => one?.code === NEVER);
  const wrong = never ? 'It can never start' : plan && !plan.chosen ? 'It does not fit' : null;
  return html`<div class=${wrong ? 'verdict wrong' : 'verdict right'} role="status"><h2>${wrong ?? 'Valid'}</h2><p>${explanation.reason.message}</p>
    ${start?.at && html`<p>Expected to start <strong>${range(start, serverNow())}</strong>.</p>`}
    ${start && !start.at && start.reason && html`<p>Its start can't be predicted: ${start.reason.message}.</p>`}
    ${explanation.queue_length ? html`<p>It would be one of ${plural(explanation.queue_length, 'waiting job')}.</p>` : ''}
    ${explanation.counterfactuals.map((one) => html`<p key=${one.message}>Instead: ${one.message}${new Date(one.at ?? 0) > serverNow() ? ` (about ${clock(one.at)})` : ''}.</p>`)}
    ${explanation.sync && html`<p>The ranks would synchronize by <strong>${explanation.sync.chosen}</strong>: ${explanation.sync.options.find(({ name }) => name === explanation.sync.chosen)?.why}.</p>`}
    ${plan && html`<${Plan} plan=${plan} />`}</div>`;
}

// The planner's division of the job, with its memory and speed.
function Plan({ plan }) {
  if (!plan.chosen) return html`<p>${plan.change}</p>`;
  const mesh = plan.meshes.find(({ name }) => name === plan.chosen);
  return html`<p>Planned: <code>${mesh.name}</code>, about ${duration(mesh.step_time_s)} per step, ${bytes(mesh.memory.total_bytes)} on the worker with the most${
    plan.memory_bytes_per_rank ? ` of ${bytes(plan.memory_bytes_per_rank)}` : ''}.</p>`;
}

function Editor({ text, setText, wrongLine, schema, element }) {
  const gutter = useRef(null);
  const [offers, setOffers] = useState(null);
  const count = text.split('\n').length;
  const caret = useRef(null);
  useLayoutEffect(() => {
    if (caret.current === null) return;
    element.current.setSelectionRange(caret.current, caret.current);
    caret.current = null;
  }, [text]);
  const replace = (from, to, by, at = from + by.length) => {
    caret.current = at;
    setText(text.slice(0, from) + by + text.slice(to));
  };
  const offer = () => {
    if (!schema || !isJson(text)) return;
    const at = element.current.selectionStart;
    const { path, typed } = openAt(text, at);
    if (typed === null) return;
    const fields = fieldsAt(path, schema).filter(({ name }) => name.startsWith(typed)).slice(0, 40);
    setOffers(fields.length ? { fields, at, typed, chosen: 0 } : null);
  };
  const take = (name) => {
    const { at, typed } = offers;
    const quoted = text[at - typed.length - 1] === '"';
    const from = at - typed.length - (quoted ? 1 : 0);
    const end = quoted && text[at] === '"' ? at + 1 : at;
    replace(from, end, `"${name}": `);
    setOffers(null);
    element.current.focus();
  };
  const key = (event) => {
    if (offers) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) setOffers({ ...offers, chosen: (offers.chosen + step + offers.fields.length) % offers.fields.length });
      else if (event.key === 'Enter' || event.key === 'Tab') take(offers.fields[offers.chosen].name);
      else {
        setOffers(null);
        if (event.key !== 'Escape') return;
      }
      event.preventDefault();
      return;
    }
    const { selectionStart: at, selectionEnd: end } = element.current;
    if (event.key === ' ' && event.ctrlKey) {
      event.preventDefault();
      offer();
    } else if (event.key === 'Enter' && !event.ctrlKey) {
      event.preventDefault();
      const indent = /^\s*/.exec(text.slice(text.lastIndexOf('\n', at - 1) + 1, at))[0];
      replace(at, end, `\n${indent}${/[{[]\s*$/.test(text.slice(0, at)) ? '  ' : ''}`);
    }
  };
  return html`<div class="edit"><div class="editor">
      <div class="gutter" ref=${gutter} aria-hidden="true">${Array.from({ length: count }, (_, n) => html`<span key=${n} class=${n + 1 === wrongLine ? 'wrong' : ''}>${n + 1}</span>`)}</div>
      <textarea ref=${element} value=${text} spellcheck=${false} autocapitalize="off" autocomplete="off" aria-label="Job document, in JSON or YAML" aria-invalid=${Boolean(wrongLine)}
        aria-controls=${offers ? 'offers' : undefined} aria-activedescendant=${offers ? `offer-${offers.chosen}` : undefined}
        onInput=${(event) => { setOffers(null); setText(event.target.value); }} onKeyDown=${key} onScroll=${(event) => { if (gutter.current) gutter.current.scrollTop = event.target.scrollTop; }} onBlur=${() => setTimeout(() => setOffers(null), 150)}></textarea>
    </div>
    ${offers && html`<ul class="offers" id="offers" role="listbox" aria-label="Fields">${offers.fields.map(({ name, description }, n) => html`<li key=${name} id=${`offer-${n}`} role="option" aria-selected=${n === offers.chosen}
      onMouseDown=${(event) => { event.preventDefault(); take(name); }}><code>${name}</code> <span class="soft">${description.split('\n')[0]}</span></li>`)}</ul>`}</div>`;
}
