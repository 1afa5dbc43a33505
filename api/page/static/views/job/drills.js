// Drills: faults that a user injects into a running job, and how the job recovered.

import { change } from '../../lib/api.js';
import { clock, duration, exactly, whole } from '../../lib/format.js';
import { html, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Dialog, Failure } from '../../parts/common.js';
import { Form } from '../../parts/form.js';
import { nameOf } from '../../parts/job_parts.js';

const KINDS = [['kill', 'Kill the process of a rank'], ['stall', 'Stop the process of a rank, so that it hangs'], ['corrupt', 'Flip a bit of a parameter of a rank'], ['preempt', 'Ask the job to release its slots']];
const EVERY_MS = 3000;

export function Drills({ job }) {
  const { data, error, refresh } = usePoll(`v1/jobs/${job.id}/drills`, {}, EVERY_MS);
  const [isOpen, setIsOpen] = useState(false);
  const canStart = job.state === 'RUNNING';
  const drills = [...(data?.items ?? [])].reverse();
  if (!canStart && !drills.length) return html`<${Failure} error=${error} />`;
  return html`<section class="card" aria-label="Drills"><h2>Drills</h2><${Failure} error=${error} />
    ${drills.length === 0 ? html`<p class="soft">A drill injects a fault into the job, to test how it recovers.</p>` : html`<div class="sideways" tabindex="0" role="region" aria-label="The drills of the job"><table><thead><tr><th>Fault</th><th class="num">Rank</th><th>State</th><th class="num">At step</th><th class="num">Recovery</th><th class="num">Lost steps</th><th>Result</th><th>Started</th></tr></thead>
      <tbody>${drills.map((one) => html`<tr key=${one.id}><td>${one.kind}</td><td class="num">${one.kind === 'preempt' ? '–' : one.rank}</td><td class=${one.state === 'failed' ? 'failed' : ''}>${one.state}</td><td class="num">${whole(one.step ?? one.at_step)}</td>
        <td class="num">${duration(one.recovery_s)}</td><td class="num">${whole(one.steps_lost)}</td><td class="sentence">${one.message}</td><td class="kept" title=${exactly(one.created_at)}>${clock(one.created_at)}</td></tr>`)}</tbody></table></div>`}
    ${canStart && html`<p class="buttons"><button onClick=${() => setIsOpen(true)}>Start a drill</button></p>`}
    ${isOpen && html`<${StartDrill} job=${job} onClose=${() => setIsOpen(false)} onDone=${() => { setIsOpen(false); refresh(); }} />`}</section>`;
}

function StartDrill({ job, onClose, onDone }) {
  const comparesReplicas = Boolean(job.spec.check) && job.world_size > 1;
  const [values, setValues] = useState({ kind: 'kill', rank: '0', at_step: '' });
  const [error, setError] = useState(null);
  const [isBusy, setIsBusy] = useState(false);
  // A text that is no whole number is sent as it is, and the server names the error.
  const number = (text) => (/^\d+$/.test(text.trim()) ? Number(text) : text);
  const start = async () => {
    setIsBusy(true);
    setError(null);
    try {
      await change('POST', `v1/jobs/${job.id}/drill`, { kind: values.kind, ...(values.kind !== 'preempt' && { rank: number(values.rank) }), ...(values.at_step.trim() && { at_step: number(values.at_step) }) });
      onDone();
    } catch (raised) {
      setError(raised);
      setIsBusy(false);
    }
  };
  const fields = [
    { name: 'kind', title: 'Fault', options: KINDS.filter(([kind]) => kind !== 'corrupt' || comparesReplicas) },
    ...(values.kind === 'preempt' ? [] : [{ name: 'rank', title: 'Rank', hint: `0 to ${job.world_size - 1}` }]),
    { name: 'at_step', title: 'At step', hint: 'Immediately if empty' },
  ];
  return html`<${Dialog} title=${`Start a drill of ${nameOf(job)}`} onClose=${onClose}><p>The fault is injected into the running job.</p>
    <${Form} fields=${fields} values=${values} onChange=${setValues} error=${error} onSubmit=${start}><button type="button" onClick=${onClose}>Close</button><button class="danger" disabled=${isBusy}>Start</button><//><//>`;
}
