// The tags and notes of a job, which users can change at any time.

import { change } from '../../lib/api.js';
import { html, useEffect, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { Failure } from '../../parts/common.js';
import { Tags } from '../../parts/job_parts.js';
import { Notes } from '../../parts/notes.js';

const TAG = '[A-Za-z0-9][A-Za-z0-9._\\/\\-]*';

export function Annotations({ jobId }) {
  const path = `v1/jobs/${jobId}/annotations`;
  const { data, refresh } = usePoll(path, {}, 30000);
  const [changed, setChanged] = useState(null);
  const [error, setError] = useState(null);
  const [tag, setTag] = useState('');
  useEffect(() => { setChanged(null); setError(null); }, [jobId]);
  const found = changed && (!data || changed.revision >= data.revision) ? changed : data;
  if (!found) return null;

  // Returns whether it succeeded. Changes of tags need no revision: concurrent changes are merged.
  const patch = async (body, revision) => {
    try {
      setChanged(await change('PATCH', path, body, {}, revision === undefined ? {} : { 'If-Match': `"${revision}"` }));
      setError(null);
      return true;
    } catch (raised) {
      setError(raised);
      refresh();
      return false;
    }
  };
  const addTag = async (event) => {
    event.preventDefault();
    if (tag && await patch({ add_tags: [tag] })) setTag('');
  };
  return html`<section class="annotations" aria-label="Tags and notes">
    <${Notes} key=${jobId} found=${found} most="32768" onAnswer=${() => setError(null)} save=${(notes) => patch({ notes }, found.revision)}>
      <${Tags} tags=${found.tags} onRemove=${(one) => patch({ remove_tags: [one] })} />
      <form onSubmit=${addTag}><input aria-label="A tag to add; Enter adds it" placeholder="add a tag" pattern=${TAG} title="Letters, digits and . _ / -" maxlength="63" value=${tag} onInput=${(event) => setTag(event.target.value)} /></form><//>
    <${Failure} error=${error} />
  </section>`;
}
