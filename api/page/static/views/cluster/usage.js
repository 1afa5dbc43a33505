// The usage of the cluster over time, why jobs waited, and GPUs that are held but not used.

import { address, adjust } from '../../lib/address.js';
import { serverNow } from '../../lib/api.js';
import { ago, exactly, fixed, money, percent, period, plural, whole } from '../../lib/format.js';
import { html } from '../../lib/html.js';
import { useNow, usePoll } from '../../lib/live.js';
import { csvOf, save } from '../../lib/save.js';
import { useStore } from '../../lib/stores.js';
import { Bars } from '../../parts/bars.js';
import { Empty, Fact, Failure, Loading } from '../../parts/common.js';
import { toJob } from '../../parts/job_parts.js';
import { NUM_COLOURS } from '../../lib/colours.js';

const EVERY_MS = 60000;
const HOUR_MS = 3600000;
const ZONE = new Intl.DateTimeFormat().resolvedOptions().timeZone || 'UTC';
// The lengths of a report in days, and their names.
const SPANS = { hour: [[1, '24 hours'], [3, '3 days'], [7, '7 days']], day: [[7, '7 days'], [30, '30 days'], [90, '90 days'], [365, '1 year']] };
const hours = (value) => fixed(value, value < 10 ? 2 : 0, true);
// What the chart shows: [key, name, the numbers of a series, the numbers of the capacity, format].
const SHOWN = [
  ['gpu', 'GPU hours', (of) => of.gpu_hours, (of) => of.gpu_hours, hours],
  ['cpu', 'CPU hours', (of) => of.cpu_hours, (of) => of.cpu_hours, hours],
  ['slot', 'Slot hours', (of) => of.slot_hours, null, hours],
  ['idle', 'Idle GPU hours', (of) => of.idle_gpu_hours, null, hours],
  ['started', 'Jobs started', (of) => of.num_started, null, whole],
  ['succeeded', 'Jobs succeeded', (of) => of.num_succeeded, null, whole],
  ['failed', 'Jobs failed', (of) => of.num_failed, null, whole],
  ['cancelled', 'Jobs cancelled', (of) => of.num_cancelled, null, whole],
];
const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const words = (code) => code.replaceAll('_', ' ');

export function Usage() {
  const { params } = useStore(address);
  const per = params.get('per') === 'hour' ? 'hour' : 'day';
  const by = ['user', 'queue'].includes(params.get('by')) ? params.get('by') : '';
  const days = SPANS[per].find(([number]) => number === Number(params.get('days')))?.[0] ?? SPANS[per][0][0];
  // Rounded, so that the address of the request is the same for an hour.
  const since = new Date(HOUR_MS * Math.floor(serverNow() / HOUR_MS) - 24 * HOUR_MS * days + HOUR_MS).toISOString();
  const { data, error } = usePoll('v1/usage', { per, by, since, time_zone: ZONE }, EVERY_MS);
  const choice = (name, value, options, label) => html`<label>${label} <select aria-label=${label} value=${value} onChange=${(event) => adjust({ [name]: event.target.value })}>
    ${options.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}</select></label>`;
  const shown = data && [...SHOWN, ...data.total.costs.map(({ currency }) => [`cost-${currency}`, `Cost in ${currency}`, (of) => of.costs.find((one) => one.currency === currency)?.amounts ?? data.starts.map(() => 0), null, (value) => money(value, currency)])];
  const first = data && (sum(data.capacity.gpu_hours) + sum(data.total.gpu_hours) > 0 ? 'gpu' : 'cpu');
  const wanted = shown?.find(([key]) => key === (params.get('show') ?? first)) ?? shown?.[0];
  return html`<div class="toolbar">
      ${choice('per', per, [['day', 'Days'], ['hour', 'Hours']], 'Periods')}
      ${choice('days', days, SPANS[per], 'Last')}
      ${choice('by', by, [['', 'All together'], ['user', 'User'], ['queue', 'Queue']], 'By')}
      ${shown && choice('show', wanted[0], shown, 'Show')}</div>
    <${Failure} error=${error} />
    ${!data ? !error && html`<${Loading} />` : html`<${Totals} data=${data} /><${Used} data=${data} wanted=${wanted} /><${Waits} data=${data} /><${Idle} />`}`;
}

function Totals({ data: { total, capacity } }) {
  const of = (used, most) => html`${hours(sum(used))}${sum(most) > 0 ? ` of ${hours(sum(most))} (${percent(sum(used) / sum(most))})` : ''}`;
  return html`<dl class="facts card">
    ${sum(capacity.gpu_hours) + sum(total.gpu_hours) > 0 && html`<${Fact} name="GPU hours used">${of(total.gpu_hours, capacity.gpu_hours)}<//>`}
    <${Fact} name="CPU hours used">${of(total.cpu_hours, capacity.cpu_hours)}<//>
    ${sum(total.measured_gpu_hours) > 0 && html`<${Fact} name="Idle GPU hours" title="Measured GPU hours in which a kernel ran for less than 5% of the time">${of(total.idle_gpu_hours, total.measured_gpu_hours)}<//>`}
    ${total.costs.map(({ currency, amounts }) => html`<${Fact} key=${currency} name="Cost">${money(sum(amounts), currency)}<//>`)}
    <${Fact} name="Jobs started">${whole(sum(total.num_started))}<//><${Fact} name="Jobs succeeded">${whole(sum(total.num_succeeded))}<//>
    <${Fact} name="Jobs failed">${whole(sum(total.num_failed))}<//><${Fact} name="Jobs cancelled">${whole(sum(total.num_cancelled))}<//></dl>`;
}

function Used({ data, wanted: [, title, numbers, capacityOf, format] }) {
  const { starts, per, by } = data;
  const names = starts.map((start) => period(start, per));
  const limits = capacityOf?.(data.capacity) ?? null;
  const series = by ? data.series.map((one, n) => ({ name: one.name ?? 'all others', colour: one.name === null ? null : n % NUM_COLOURS, values: numbers(one) })) : [{ name: 'all', colour: 0, values: numbers(data.total) }];
  const kept = series.filter(({ values }) => sum(values) > 0);
  const totals = numbers(data.total);
  const isRecorded = limits && data.capacity.measured_s.some((seconds) => seconds > 0);
  const columns = [...(by ? kept : []), { name: 'Total', values: totals }, ...(isRecorded ? [{ name: 'Capacity', values: limits }] : [])];
  return html`<section class="card" aria-label=${title}><h2>${title}</h2>
    ${sum(totals) > 0 ? html`<${Bars} series=${kept} names=${names} limits=${isRecorded ? limits : null} format=${format} label=${`${title}: ${format(sum(totals))} in all. The table below has the numbers.`} />` : html`<${Empty}>Nothing was used in this time.<//>`}
    ${limits && !isRecorded && html`<p class="soft">The capacity of the cluster is not recorded for this time.</p>`}
    <${Numbers} title=${title} starts=${starts} names=${names} columns=${columns} format=${format} /></section>`;
}

// A table of all numbers, and the same as a file.
function Numbers({ title, starts, names, columns, format }) {
  const download = () => save(`${title.toLowerCase().replaceAll(' ', '-')}.csv`, csvOf([['start', ...columns.map(({ name }) => name)], ...starts.map((start, n) => [start, ...columns.map(({ values }) => values[n])])]));
  return html`<details><summary>Numbers</summary><p class="buttons"><button onClick=${download}>Save as CSV</button></p>
    <div class="sideways" tabindex="0" role="region" aria-label=${`Numbers: ${title}`}><table><thead><tr><th>Begin</th>${columns.map(({ name }) => html`<th key=${name} class="num">${name}</th>`)}</tr></thead>
      <tbody>${names.map((name, n) => html`<tr key=${starts[n]}><td class="kept" title=${exactly(starts[n])}>${name}</td>${columns.map(({ name: of, values }) => html`<td key=${of} class="num">${values[n] ? format(values[n]) : '–'}</td>`)}</tr>`)}</tbody></table></div></details>`;
}

function Waits({ data }) {
  const { starts, per, waits, capacity } = data;
  const names = starts.map((start) => period(start, per));
  const series = waits.map(({ code, job_hours: values }, n) => ({ name: words(code), colour: n % NUM_COLOURS, values }));
  const recorded = sum(capacity.measured_s);
  return html`<section class="card" aria-label="Why jobs waited"><h2>Why jobs waited</h2>
    ${recorded === 0 ? html`<${Empty}>Waiting jobs are not recorded for this time.<//>` : series.length === 0 ? html`<${Empty}>No jobs waited in this time.<//>` : html`
      <p class="soft">Hours for which jobs waited, added up over the jobs, by the reason at the time.</p>
      <${Bars} series=${series} names=${names} format=${hours} label=${`Jobs waited for ${hours(sum(series.flatMap(({ values }) => values)))} hours in all. The table below has the numbers.`} />
      <${Numbers} title="Hours of waiting jobs" starts=${starts} names=${names} columns=${series} format=${hours} />`}</section>`;
}

function Idle() {
  const { data, error } = usePoll('v1/usage/idle-gpus', {}, EVERY_MS);
  const now = useNow(5000);
  if (!data) return html`<${Failure} error=${error} />`;
  const { items, unmeasured } = data;
  return html`<section class="card" aria-label="Idle GPUs"><h2>GPUs that are held but idle now</h2>
    ${items.length === 0 ? html`<p class="soft">No measured GPU has been idle for 15 minutes.</p>` : html`<div class="sideways" tabindex="0" role="region" aria-label="Jobs with idle GPUs"><table><thead><tr><th>Job</th><th>Held by</th><th>Queue</th><th class="num">Idle GPUs</th><th>Ranks</th><th>Idle since</th></tr></thead>
      <tbody>${items.map((one) => html`<tr key=${one.job_id}><td><a href=${toJob(one.job_id, 'ranks')}>${one.name || one.job_id}</a></td><td>${one.owner}</td><td>${one.queue}</td>
        <td class="num">${whole(one.num_idle)} of ${whole(one.num_measured)}</td><td>${one.ranks.slice(0, 8).join(', ')}${one.ranks.length > 8 ? ` and ${one.ranks.length - 8} more` : ''}</td><td class="kept" title=${exactly(one.idle_since)}>${ago(one.idle_since, now)}</td></tr>`)}</tbody></table></div>`}
    ${unmeasured.length > 0 && html`<p class="soft">The GPUs of ${plural(unmeasured.length, 'job')} are not measured: ${unmeasured.slice(0, 8).map((one) => html`<a key=${one.job_id} href=${toJob(one.job_id)}>${one.name || one.job_id}</a> (${one.owner}) `)}</p>`}</section>`;
}
