// The texts that the model generated at its evaluations, for each prompt in the order of the steps.

import { whole } from '../../lib/format.js';
import { html } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Failure, Loading } from '../../parts/common.js';
import { ENDED } from '../../parts/job_parts.js';

const textOf = (prompt) => (typeof prompt === 'string' ? prompt : prompt.map(({ role, content }) => `${role}: ${content}`).join('\n'));

export function Samples({ job }) {
  const { data, error } = usePoll(`v1/jobs/${job.id}/samples`, { limit: 500 }, ENDED.has(job.state) ? 0 : 5000);
  if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const { items, prompts } = data;
  return html`<${Failure} error=${error} />
    ${items.length === 0 && html`<p class="soft">No texts have been generated yet.</p>`}
    ${data.next_cursor && html`<p class="note">The first ${items.length} evaluations are shown. <code>dray samples ${job.id}</code> prints all.</p>`}
    ${items.length > 0 && prompts.map((prompt, at) => html`<div class="card" key=${at}><h2 class="minor">Prompt ${at + 1}</h2><pre>${textOf(prompt)}</pre>
      <table><thead><tr><th class="num">Step</th><th>Text</th></tr></thead>
      <tbody>${items.map(({ step, texts }) => html`<tr key=${step}><td class="num">${whole(step)}</td><td><pre>${texts[at]}</pre></td></tr>`)}</tbody></table></div>`)}`;
}
