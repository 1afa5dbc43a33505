// The tags and notes of a job, which users can change at any time.

import { change } from '../../lib/api.js';
import { clock } from '../../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../../lib/html.js';
import { usePoll } from '../../lib/live.js';
import { markdown } from '../../lib/markdown.js';
import { Failure } from '../../parts/common.js';
import { Tags } from '../../parts/job_parts.js';

const TAG = '[A-Za-z0-9][A-Za-z0-9._\\/\\-]*';

export function Annotations({ jobId }) {
  const path = `v1/jobs/${jobId}/annotations`;
  const { data, refresh } = usePoll(path, {}, 30000);
  const [changed, setChanged] = useState(null);
  const [error, setError] = useState(null);
  const [tag, setTag] = useState('');
  // The draft of notes: {text, before}; `before` are the notes that it replaces.
  const [draft, setDraft] = useState(null);
  useEffect(() => { setChanged(null); setDraft(null); setError(null); }, [jobId]);
  const found = changed && (!data || changed.revision >= data.revision) ? changed : data;
  const box = useRef(null);
  useEffect(() => { if (draft) box.current?.focus(); }, [Boolean(draft)]);
  const shown = useMemo(() => markdown(found?.notes ?? ''), [found?.notes]);
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
  const save = async () => {
    if (await patch({ notes: draft.text }, found.revision)) setDraft(null);
  };
  const isOld = Boolean(draft) && found.notes !== draft.before;
  return html`<section class="annotations" aria-label="Tags and notes">
    <div class="buttons"><${Tags} tags=${found.tags} onRemove=${(one) => patch({ remove_tags: [one] })} />
      <form onSubmit=${addTag}><input aria-label="A tag to add; Enter adds it" placeholder="add a tag" pattern=${TAG} title="Letters, digits and . _ / -" maxlength="63" value=${tag} onInput=${(event) => setTag(event.target.value)} /></form>
      ${!draft && html`<button class="quiet" onClick=${() => setDraft({ text: found.notes, before: found.notes })}>${found.notes ? 'Edit notes' : 'Write notes'}</button>`}
      ${found.updated_at && html`<span class="soft">${found.updated_by}, ${clock(found.updated_at)}</span>`}</div>
    <${Failure} error=${error} />
    ${!draft && found.notes && html`<div class="notes" tabindex="0" role="region" aria-label="Notes">${shown}</div>`}
    ${draft && html`<div><textarea ref=${box} rows="5" maxlength="32768" aria-label="Notes, in Markdown" value=${draft.text} onInput=${(event) => setDraft({ ...draft, text: event.target.value })}></textarea>
      ${isOld && html`<div class="failure" role="status"><strong>${found.updated_by} has changed the notes in the meantime:</strong><p class="source">${found.notes || '(none)'}</p>
        <button onClick=${() => { setError(null); setDraft({ ...draft, before: found.notes }); }}>Replace them with mine</button></div>`}
      <p class="buttons"><button class="primary" disabled=${isOld} onClick=${save}>Save the notes</button><button onClick=${() => { setDraft(null); setError(null); }}>Discard changes</button></p></div>`}
  </section>`;
}
