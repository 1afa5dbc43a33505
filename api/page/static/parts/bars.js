// Stacked bars over time. The numbers are also in the table below each chart.

import { html } from '../lib/html.js';
import { Swatch } from './chart.js';

const MOST_LABELS = 8;
const roomy = (count) => Math.max(1, Math.ceil(count / MOST_LABELS));

// series: [{name, colour, values}], values with one number for each label; `colour` is null for grey. limits: the
// largest possible sum of each bar, drawn as a line, or null. format: of a number. names: of the bars.
export function Bars({ series, names, limits = null, format, label }) {
  const sums = names.map((_, n) => series.reduce((sum, { values }) => sum + values[n], 0));
  const most = Math.max(...sums, ...(limits ?? []), 0);
  const share = (value) => `${most ? (100 * value) / most : 0}%`;
  const every = roomy(names.length);
  return html`<figure class="bars"><div class="axis num" aria-hidden="true"><span>${format(most)}</span><span>${format(most / 2)}</span><span>0</span></div>
    <div class="stacks" role="img" aria-label=${label}>${names.map((name, n) => html`<div key=${n} class="stack" title=${titleOf(name, n, series, limits, format)}>
      ${limits && limits[n] > 0 && html`<span class="limit" style=${{ bottom: share(limits[n]) }}></span>`}
      ${series.map(({ name: of, colour, values }) => values[n] > 0 && html`<span key=${of} class=${`part ${colour === null ? 'grey' : `colour-${colour}`}`} style=${{ height: share(values[n]) }}></span>`)}</div>`)}</div>
    <div class="names" aria-hidden="true">${names.map((name, n) => n % every === 0 && html`<span key=${n} style=${{ left: `${(100 * n) / names.length}%` }}>${name}</span>`)}</div></figure>
    ${(series.length > 1 || limits) && html`<p class="keys">${series.map(({ name, colour }) => html`<span key=${name}>${colour === null ? html`<span class="swatch"></span>` : html`<${Swatch} n=${colour} />`}${name}</span>`)}${limits && html`<span><span class="limit"></span>capacity</span>`}</p>`}`;
}

function titleOf(name, n, series, limits, format) {
  const used = series.filter(({ values }) => values[n] > 0).map(({ name: of, values }) => `${of}: ${format(values[n])}`);
  return [name, ...used, ...(limits?.[n] > 0 ? [`capacity: ${format(limits[n])}`] : [])].join('\n');
}
