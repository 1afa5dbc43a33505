// Small parts that every view uses.

import { html, useEffect, useLayoutEffect, useRef, useState } from '../lib/html.js';

// The text between backticks is code.
const withCode = (text) => text.split('`').map((part, n) => (n % 2 ? html`<code key=${n}>${part}</code>` : part));

export function Failure({ error, retry }) {
  if (!error) return null;
  return html`<div class="failure" role="alert">
    <strong>${error.message}</strong>
    ${error.hint && html`<span> ${withCode(error.hint)}</span>`}
    ${retry && html` <button onClick=${retry}>Try again</button>`}
  </div>`;
}

export const Loading = () => html`<p class="loading" role="status">Loading …</p>`;
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export function Tabs({ tabs, current, onChoose, label }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = tabs.findIndex(([name]) => name === current);
    const [next] = tabs[(at + step + tabs.length) % tabs.length];
    onChoose(next);
    event.currentTarget.querySelector(`[data-tab="${next}"]`)?.focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
    ${tabs.map(([name, text]) => html`<button key=${name} role="tab" id=${`tab-${name}`} data-tab=${name}
      aria-selected=${name === current} aria-controls="panel" tabindex=${name === current ? 0 : -1}
      onClick=${() => onChoose(name)}>${text}</button>`)}
  </div>`;
}

// A native dialog, which keeps the focus and closes with Escape.
export function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    const dialog = box.current;
    if (!dialog.open) dialog.showModal();
    return () => dialog.close();
  }, []);
  return html`<dialog ref=${box} aria-label=${title} onClose=${onClose}
      onClick=${(event) => event.target === box.current && onClose()}>
    <div class="dialog"><h2>${title}</h2>${children}</div>
  </dialog>`;
}

// A button that shows more controls. They disappear with Escape, or when the reader clicks elsewhere.
export function Menu({ label, text = '⋯', children }) {
  const box = useRef(null);
  const items = useRef(null);
  const [isOpen, setIsOpen] = useState(false);
  // Placed in the window, since a table would cut it off.
  useLayoutEffect(() => {
    if (!isOpen) return;
    const [at, { offsetWidth: width, offsetHeight: height, style }] = [box.current.getBoundingClientRect(), items.current];
    style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
    style.top = `${Math.max(8, at.bottom + height + 8 > innerHeight ? at.top - height - 4 : at.bottom + 4)}px`;
  }, [isOpen]);
  useEffect(() => {
    if (!isOpen) return undefined;
    const leave = ({ type, target }) => { if (box.current && !(type === 'scroll' ? items : box).current?.contains(target)) box.current.open = false; };
    const types = ['pointerdown', 'focusin', 'scroll'];
    for (const type of types) document.addEventListener(type, leave, true);
    return () => { for (const type of types) document.removeEventListener(type, leave, true); };
  }, [isOpen]);
  const key = (event) => {
    if (event.key !== 'Escape' || !isOpen) return;
    box.current.open = false;
    box.current.querySelector('summary').focus();
  };
  return html`<details class="menu" ref=${box} onToggle=${() => setIsOpen(box.current.open)} onKeyDown=${key}><summary aria-label=${label} title=${label}>${text}</summary>
    ${isOpen && html`<div class="items" ref=${items} onClick=${(event) => { if (box.current && event.target.closest('button')) box.current.open = false; }}>${children}</div>`}</details>`;
}

export function Bar({ parts, label }) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  if (!total) return null;
  return html`<div class="share-bar" role="img" aria-label=${label}>
    ${parts.filter((part) => part.value > 0).map((part) => html`<span key=${part.name} class=${`share share-${part.name}`}
      style=${{ width: `${(100 * part.value) / total}%` }} title=${part.title}></span>`)}
  </div>`;
}

export function Fact({ name, children, title }) {
  return html`<div class="fact" title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;
}

export function Copy({ text, label = 'Copy' }) {
  const button = useRef(null);
  const copy = async () => {
    const outcome = await navigator.clipboard.writeText(text).then(() => 'Copied', () => 'Not allowed');
    if (!button.current) return;
    button.current.textContent = outcome;
    setTimeout(() => { if (button.current) button.current.textContent = label; }, 1500);
  };
  return navigator.clipboard ? html`<button class="quiet" ref=${button} onClick=${copy}>${label}</button>` : null;
}
