// Saves what a chart shows as a file: PNG, SVG or CSV.

const WIDTH_OF_LEGEND = 170;

export function save(name, blob) {
  const anchor = document.createElement('a');
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60000);
}

// A name without characters that file systems refuse.
export const fileName = (title, suffix) => `${title.replace(/[^\p{L}\p{N}._-]+/gu, '-').slice(0, 100) || 'chart'}.${suffix}`;

// A cell of a CSV file. A text that a spreadsheet would take for a formula gets a leading apostrophe.
function cell(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'number') return String(value);
  const text = /^(\s*[=+@-]|[\t\r])/.test(value) && !/^-?Infinity$/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csvOf = (rows) => new Blob([rows.map((row) => `${row.map(cell).join(',')}\r\n`).join('')], { type: 'text/csv' });

// The points of the curves between `low` and `high`: a row for each x, a column for each curve.
export function curvesCsv(curves, axis, [low, high]) {
  const rows = new Map();
  curves.forEach(({ xs, ys, texts }, n) => xs.forEach((x, i) => {
    if (x < low || x > high) return;
    if (!rows.has(x)) rows.set(x, [x, ...curves.map(() => null)]);
    rows.get(x)[n + 1] = ys[i] ?? texts?.[i];
  }));
  return csvOf([[axis || 'step', ...curves.map(({ name }) => name)], ...[...rows.values()].sort((a, b) => a[0] - b[0])]);
}

// The canvas of a plot with its title and the names of its curves. shown: [{name, stroke, dash}].
export function plotPng(u, title, shown, { background, text }) {
  const ratio = devicePixelRatio || 1;
  const canvas = document.createElement('canvas');
  const [width, height] = [u.ctx.canvas.width, u.ctx.canvas.height];
  const lines = shown.length > 1 ? shown.length : 0;
  canvas.width = width;
  canvas.height = height + ratio * (28 + 16 * lines);
  const ctx = canvas.getContext('2d');
  ctx.fillStyle = background;
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.drawImage(u.ctx.canvas, 0, 28 * ratio);
  ctx.scale(ratio, ratio);
  ctx.fillStyle = text;
  ctx.font = '600 13px system-ui, sans-serif';
  ctx.fillText(title, 10, 18);
  ctx.font = '12px system-ui, sans-serif';
  if (lines) {
    shown.forEach(({ name, stroke, dash }, n) => {
      const y = 28 + height / ratio + 16 * n + 8;
      ctx.strokeStyle = stroke;
      ctx.lineWidth = 2;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(10, y - 4);
      ctx.lineTo(34, y - 4);
      ctx.stroke();
      ctx.fillText(name, 40, y);
    });
  }
  return new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
}

const escaped = (text) => String(text).replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

// The plot as an SVG. shown: [{name, stroke, dash, lines: [values], band}], values in the order of u.data[0].
// ticks: {x: {places, texts}, y: {places, texts}}.
export function plotSvg(u, title, shown, ticks, { background, text, grid }) {
  const [left, top] = [u.over.offsetLeft, u.over.offsetTop + 28];
  const [width, height] = [u.over.clientWidth, u.over.clientHeight];
  const legend = shown.length > 1 ? WIDTH_OF_LEGEND : 0;
  const x = (value) => left + u.valToPos(value, 'x');
  const y = (value) => top + u.valToPos(value, 'y');
  const parts = [];
  for (const [n, place] of ticks.x.places.entries()) {
    if (x(place) < left - 1 || x(place) > left + width + 1) continue;
    parts.push(`<path d="M${x(place).toFixed(1)} ${top}v${height}" stroke="${grid}"/><text x="${x(place).toFixed(1)}" y="${top + height + 16}" text-anchor="middle">${escaped(ticks.x.texts[n])}</text>`);
  }
  for (const [n, place] of ticks.y.places.entries()) {
    if (place === null || y(place) < top - 1 || y(place) > top + height + 1 || !ticks.y.texts[n]) continue;
    parts.push(`<path d="M${left} ${y(place).toFixed(1)}h${width}" stroke="${grid}"/><text x="${left - 6}" y="${(y(place) + 4).toFixed(1)}" text-anchor="end">${escaped(ticks.y.texts[n])}</text>`);
  }
  const line = (values) => {
    let path = '';
    values.forEach((value, i) => {
      if (value === null || value === undefined) return;
      path += `${path ? 'L' : 'M'}${x(u.data[0][i]).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    return path;
  };
  parts.push(`<clipPath id="in"><rect x="${left}" y="${top}" width="${width}" height="${height}"/></clipPath><g clip-path="url(#in)" fill="none" stroke-linejoin="round">`);
  for (const { stroke, dash, lines } of shown) {
    lines.forEach((values, n) => parts.push(`<path d="${line(values)}" stroke="${stroke}" stroke-width="${n ? 1 : 1.6}"${n ? ' opacity=".35"' : ''}${dash.length ? ` stroke-dasharray="${dash.join(' ')}"` : ''}/>`));
  }
  parts.push('</g>');
  if (legend) {
    shown.forEach(({ name, stroke, dash }, n) => {
      const at = top + 8 + 17 * n;
      parts.push(`<path d="M${left + width + 16} ${at}h20" stroke="${stroke}" stroke-width="2"${dash.length ? ` stroke-dasharray="${dash.join(' ')}"` : ''}/><text x="${left + width + 42}" y="${at + 4}">${escaped(name)}</text>`);
    });
  }
  const size = `width="${left + width + 20 + legend}" height="${Math.max(top + height + 28, legend ? top + 17 * shown.length + 10 : 0)}"`;
  const body = `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="system-ui, sans-serif" font-size="11" fill="${text}"><rect width="100%" height="100%" fill="${background}"/><text x="10" y="18" font-size="13" font-weight="600">${escaped(title)}</text>${parts.join('')}</svg>`;
  return new Blob([body], { type: 'image/svg+xml' });
}
