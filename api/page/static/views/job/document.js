// The document of a job, without the fields that have their default.

import { link } from '../../lib/address.js';
import { html, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { withoutDefaults } from '../../lib/schema.js';
import { Copy, Failure, Loading } from '../../parts/common.js';

export function Document({ job }) {
  const [whole, setWhole] = useState(false);
  const { data: schema, error } = usePoll('v1/schema', {}, 0);
  if (!schema) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const shown = whole ? job.spec : withoutDefaults(job.spec, schema);
  const text = JSON.stringify(shown, null, 2);
  return html`<div class="toolbar"><label><input type="checkbox" checked=${whole} onChange=${(event) => setWhole(event.target.checked)} /> with all defaults</label>
      <${Copy} text=${text} label="Copy" /><a class="button" href=${link(['submit'], { from: job.id })}>Edit and resubmit</a></div>
    <pre class="document" tabindex="0">${text}</pre>`;
}
