// Adds charts and tables of the runs of a view to a report: opens its editor with blocks at the end of the text.

import { go } from '../lib/address.js';
import { get } from '../lib/api.js';
import { html, useState } from '../lib/html.js';
import { usePoll } from '../lib/live.js';
import { DRAFTS } from '../views/reports/drafts.js';
import { Failure, Menu } from './common.js';

const MOST = 100;

// A block of a report. fields: values that are not set are left out.
export function blockOf(kind, fields) {
  const known = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null && value !== '' && value !== 0);
  return `\`\`\`${kind}\n${known.map(([name, value]) => `${name}: ${JSON.stringify(value)}\n`).join('')}\`\`\`\n`;
}

// blocks: a function that returns the blocks, called when the reader has chosen a report.
export function AddToReport({ blocks }) {
  return html`<${Menu} label="Add to a report" text="Add to a report"><${Choices} blocks=${blocks} /><//>`;
}

function Choices({ blocks }) {
  const { data, error } = usePoll('v1/reports', { owner: '@me', limit: MOST }, 0);
  const [failed, setFailed] = useState(null);
  const add = async (id) => {
    try {
      const kept = DRAFTS.read(id ?? 'new');
      const draft = kept ?? (id ? await get(`v1/reports/${id}`) : { title: '', text: '', version: null });
      const text = [draft.text.trimEnd(), blocks().join('\n')].filter(Boolean).join('\n\n');
      DRAFTS.write(id ?? 'new', { title: draft.title, text, version: draft.version });
      go(['reports', id ?? 'new'], { edit: id && 1 });
    } catch (raised) {
      setFailed(raised);
    }
  };
  return html`<${Failure} error=${failed ?? error} /><button onClick=${() => add(null)}>New report</button>
    ${data?.items.length > 0 && html`<label>Your reports <select value="" onChange=${(event) => { if (event.target.value) add(event.target.value); }}><option value="">choose …</option>
      ${data.items.map(({ id, title }) => html`<option key=${id} value=${id}>${title}</option>`)}</select></label>`}`;
}
