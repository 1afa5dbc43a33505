// Shows a record of each kind of media: {jobId, record, title, useFile}.

import { bytes, duration, number, percent, whole } from '../lib/format.js';
import { html, useState } from '../lib/html.js';
import { Failure } from './common.js';
import { shareOf } from './heat_map.js';

const PAGE_ROWS = 100;
const MAX_LABELLED = 20;
// Sizes of the drawings in pixels.
const [WIDE, HIGH, LEFT, BELOW] = [320, 170, 44, 20];

function Image({ jobId, record: { step, value }, title, useFile }) {
  const { url, error } = useFile(jobId, value.file);
  return html`<${Failure} error=${error} /><figure>${url && html`<img src=${url} alt=${`${title}, step ${whole(step)}`} class=${value.width < 256 ? 'pixels' : ''} />`}
    <figcaption>${whole(value.width)} × ${whole(value.height)}, ${bytes(value.file.size_bytes)}</figcaption></figure>`;
}

function Audio({ jobId, record: { step, value }, title, useFile }) {
  const { url, error } = useFile(jobId, value.file);
  return html`<${Failure} error=${error} />${url && html`<audio controls src=${url} aria-label=${`${title}, step ${whole(step)}`}></audio>`}
    <p class="soft">${duration(value.seconds)}, ${whole(value.sample_rate)} Hz, ${value.channels === 1 ? 'mono' : value.channels === 2 ? 'stereo' : `${value.channels} channels`}</p>`;
}

function Text({ record: { value } }) {
  return html`<pre class="reported" tabindex="0">${value.text}</pre>${value.num_chars > [...value.text].length && html`<p class="note">The first ${whole([...value.text].length)} of ${whole(value.num_chars)} characters.</p>`}`;
}

function Histogram({ record: { value }, title }) {
  const { counts, edges, not_finite: left } = value;
  const most = Math.max(...counts, 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const [low, high] = [edges[0], edges.at(-1)];
  const x = (edge) => LEFT + shareOf(edge, low, high) * (WIDE - LEFT - 8);
  const y = (count) => 8 + (1 - count / most) * (HIGH - BELOW - 8);
  return html`<svg class="drawing" viewBox=${`0 0 ${WIDE} ${HIGH}`} role="img" aria-label=${`Histogram of ${title}: ${whole(total)} values from ${number(low)} to ${number(high)}`}>
      ${counts.map((count, n) => html`<g key=${n}><rect class="bar" x=${x(edges[n])} width=${Math.max(0.5, x(edges[n + 1]) - x(edges[n]) - 0.5)} y=${y(count)} height=${y(0) - y(count)} />
        <rect class="near" x=${x(edges[n])} width=${Math.max(0.5, x(edges[n + 1]) - x(edges[n]))} y="0" height=${HIGH - BELOW}><title>${`${number(edges[n])} to ${number(edges[n + 1])}: ${whole(count)} (${percent(count / Math.max(total, 1))})`}</title></rect></g>`)}
      <path class="axis" d=${`M${LEFT} 8V${y(0)}H${WIDE - 8}`} /><text x=${LEFT - 4} y="16" text-anchor="end">${number(most, 3)}</text>
      <text x=${LEFT} y=${HIGH - 5}>${number(low)}</text><text x=${WIDE - 8} y=${HIGH - 5} text-anchor="end">${number(high)}</text></svg>
    <p class="soft">${whole(total)} values${left > 0 ? `; ${whole(left)} more are NaN or infinite` : ''}</p>`;
}

function Curve({ record: { value }, title }) {
  const [near, setNear] = useState(null);
  const isRoc = value.kind === 'roc_curve';
  const [nameX, nameY] = isRoc ? ['false positive rate', 'true positive rate'] : ['recall', 'precision'];
  const area = `${isRoc ? 'Area under the curve' : 'Average precision'} ${number(value.area)}`;
  const [size, left, below] = [280, 34, 34];
  const x = (rate) => left + rate * (size - left - 8);
  const y = (rate) => 22 + (1 - rate) * (size - below - 22);
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const [px, py] = [((event.clientX - box.left) * size) / box.width, ((event.clientY - box.top) * size) / box.height];
    const far = value.x.map((one, n) => (x(one) - px) ** 2 + (y(value.y[n]) - py) ** 2);
    setNear(far.indexOf(Math.min(...far)));
  };
  const cells = (n) => [number(value.x[n]), number(value.y[n]), value.thresholds[n] === null ? '–' : number(value.thresholds[n])];
  // A precision holds until the next higher recall; the points of an ROC curve are joined by lines.
  const path = value.x.map((one, n) => `${n ? (isRoc ? 'L' : `V${y(value.y[n])}H`) : 'M'}${x(one)}${n && !isRoc ? '' : ` ${y(value.y[n])}`}`).join('');
  return html`<svg class="drawing curve" viewBox=${`0 0 ${size} ${size}`} role="img" aria-label=${`${nameY} over ${nameX} of ${title}. ${area}.`} onPointerMove=${point} onPointerLeave=${() => setNear(null)}>
      <path class="axis" d=${`M${x(0)} ${y(1)}V${y(0)}H${x(1)}`} />${isRoc && html`<path class="chance" d=${`M${x(0)} ${y(0)}L${x(1)} ${y(1)}`} />`}
      <path class="drawn" d=${path} />${near !== null && html`<circle cx=${x(value.x[near])} cy=${y(value.y[near])} r="4" />`}
      ${[0, 0.5, 1].map((rate) => html`<text key=${rate} x=${x(rate)} y=${size - 20} text-anchor="middle">${number(rate)}</text><text x=${left - 5} y=${y(rate) + 4} text-anchor="end">${number(rate)}</text>`)}
      <text x=${x(0.5)} y=${size - 4} text-anchor="middle">${nameX}</text><text x=${x(0)} y="12">${nameY}</text></svg>
    <p>${area}<span class="soft">${`; ${whole(value.positives)} positive and ${whole(value.negatives)} negative labels`}</span></p>
    <p class="soft" aria-live="off">${near === null ? 'Point at the curve for its threshold.' : `${nameX} ${cells(near)[0]}, ${nameY} ${cells(near)[1]} at scores from ${cells(near)[2]}`}</p>
    <details><summary>Points</summary><div class="scrolls" tabindex="0" role="region" aria-label=${`Points of ${title}`}><table><thead><tr><th class="num">${nameX}</th><th class="num">${nameY}</th><th class="num">score at least</th></tr></thead>
      <tbody>${value.x.map((_, n) => html`<tr key=${n}>${cells(n).map((cell, m) => html`<td key=${m} class="num">${cell}</td>`)}</tr>`)}</tbody></table></div></details>`;
}

function ConfusionMatrix({ record: { value: { classes, counts } }, title }) {
  const [byRow, setByRow] = useState(true);
  const [near, setNear] = useState(null);
  const sums = counts.map((row) => row.reduce((sum, count) => sum + count, 0));
  const total = sums.reduce((sum, one) => sum + one, 0);
  const right = counts.reduce((sum, row, n) => sum + row[n], 0);
  const most = Math.max(1, ...counts.flat());
  const share = (n, m) => (byRow ? counts[n][m] / Math.max(1, sums[n]) : counts[n][m] / most);
  const isLabelled = classes.length <= MAX_LABELLED;
  const cellText = near && `${classes[near[0]]} predicted as ${classes[near[1]]}: ${whole(counts[near[0]][near[1]])}, ${percent(counts[near[0]][near[1]] / Math.max(1, sums[near[0]]))} of the class`;
  return html`<label><input type="checkbox" checked=${byRow} onChange=${(event) => setByRow(event.target.checked)} /> share of each true class</label>
    <div class="scrolls" tabindex="0" role="region" aria-label=${`Confusion matrix of ${title}`}><table class=${`confusion ${isLabelled ? '' : 'dense'}`} onPointerLeave=${() => setNear(null)}>
      <thead><tr><td class="corner">true \\ predicted</td>${classes.map((name, m) => html`<th key=${m} scope="col" title=${name}>${name}</th>`)}</tr></thead>
      <tbody>${counts.map((row, n) => html`<tr key=${n}><th scope="row" title=${classes[n]}>${classes[n]}</th>${row.map((count, m) => html`<td key=${m} onPointerEnter=${() => setNear([n, m])}
        style=${{ background: `color-mix(in srgb, var(--accent) ${Math.round(45 * share(n, m))}%, transparent)` }}>${byRow && isLabelled ? percent(share(n, m)) : whole(count)}</td>`)}</tr>`)}</tbody></table></div>
    <p class="soft">${cellText ?? `${whole(total)} predictions, ${percent(right / Math.max(1, total))} are right`}</p>`;
}

function Table({ record: { value: { columns, rows, num_rows: reported } }, title }) {
  const [by, setBy] = useState({ column: null, down: false });
  const [page, setPage] = useState(0);
  const sorted = by.column === null ? rows : [...rows].sort((a, b) => compared(a[by.column], b[by.column], by.down));
  const pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
  const first = Math.min(page, pages - 1) * PAGE_ROWS;
  const isNumber = columns.map((_, n) => rows.every((row) => row[n] === null || typeof row[n] === 'number'));
  const turn = (n) => setBy((was) => (was.column === n ? { column: n, down: !was.down } : { column: n, down: false }));
  const sorting = (n) => (by.column !== n ? 'none' : by.down ? 'descending' : 'ascending');
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${`Rows of ${title}`}><table><thead><tr>${columns.map((name, n) => html`<th key=${n} class=${isNumber[n] ? 'num' : ''} aria-sort=${sorting(n)}>
      <button class="quiet" onClick=${() => turn(n)}>${name}${by.column === n ? (by.down ? ' ↓' : ' ↑') : ''}</button></th>`)}</tr></thead>
    <tbody>${sorted.slice(first, first + PAGE_ROWS).map((row, n) => html`<tr key=${n}>${row.map((cell, m) => html`<td key=${m} class=${isNumber[m] ? 'num' : ''}>${shown(cell)}</td>`)}</tr>`)}</tbody></table></div>
    ${pages > 1 && html`<p class="buttons"><button disabled=${first === 0} onClick=${() => setPage(page - 1)}>Previous rows</button><button disabled=${first + PAGE_ROWS >= rows.length} onClick=${() => setPage(first / PAGE_ROWS + 1)}>Next rows</button>
      <span class="soft">rows ${whole(first + 1)} to ${whole(Math.min(first + PAGE_ROWS, rows.length))} of ${whole(rows.length)}</span></p>`}
    ${reported > rows.length && html`<p class="note">The first ${whole(rows.length)} of ${whole(reported)} reported rows are stored.</p>`}`;
}

const shown = (cell) => (cell === null ? '–' : typeof cell === 'number' ? number(cell, 6) : String(cell));

// The order of two cells: numbers, then texts, then empty cells.
function compared(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === 'number' && typeof b === 'number' ? a - b : typeof a === 'number' ? -1 : typeof b === 'number' ? 1 : String(a).localeCompare(String(b));
  return down ? -order : order;
}

export const SHOWN = {
  image: Image, audio: Audio, text: Text, histogram: Histogram, table: Table, confusion_matrix: ConfusionMatrix, pr_curve: Curve, roc_curve: Curve,
};
