// Notes in Markdown, which users can change.

import { clock } from '../lib/format.js';
import { html, useEffect, useMemo, useRef, useState } from '../lib/html.js';
import { markdown } from '../lib/markdown.js';

// found: {notes, updated_by, updated_at}. save(text): returns whether the notes were stored. most: the maximum
// number of characters. onAnswer: called when the reader discards the draft or replaces another user's change.
// children: other controls in the same row.
export function Notes({ found, save, most, onAnswer, children }) {
  // The draft of notes: {text, before}; `before` are the notes that it replaces.
  const [draft, setDraft] = useState(null);
  const box = useRef(null);
  const button = useRef(null);
  const wasOpen = useRef(false);
  // The control that had the focus is gone.
  useEffect(() => {
    if (draft) box.current.focus();
    else if (wasOpen.current) button.current.focus();
    wasOpen.current = Boolean(draft);
  }, [Boolean(draft)]);
  const shown = useMemo(() => markdown(found.notes), [found.notes]);
  const isOld = Boolean(draft) && found.notes !== draft.before;
  const store = async () => {
    if (await save(draft.text)) setDraft(null);
  };
  return html`<div class="buttons">${children}
      ${!draft && html`<button class="quiet" ref=${button} onClick=${() => setDraft({ text: found.notes, before: found.notes })}>${found.notes ? 'Edit notes' : 'Write notes'}</button>`}
      ${found.updated_at && html`<span class="soft">changed by ${found.updated_by}, ${clock(found.updated_at)}</span>`}</div>
    ${!draft && found.notes && html`<div class="notes" tabindex="0" role="region" aria-label="Notes">${shown}</div>`}
    ${draft && html`<div><textarea ref=${box} rows="5" maxlength=${most} aria-label="Notes, in Markdown" value=${draft.text} onInput=${(event) => setDraft({ ...draft, text: event.target.value })}></textarea>
      ${isOld && html`<div class="failure" role="status"><strong>The notes have been changed in the meantime:</strong><p class="source">${found.notes || '(none)'}</p>
        <button onClick=${() => { onAnswer(); setDraft({ ...draft, before: found.notes }); }}>Replace them with mine</button></div>`}
      <p class="buttons"><button class="primary" disabled=${isOld} onClick=${store}>Save the notes</button><button onClick=${() => { onAnswer(); setDraft(null); }}>Discard changes</button></p></div>`}`;
}
