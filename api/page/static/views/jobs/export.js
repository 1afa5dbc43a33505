// Saves the list of jobs as a file, including the jobs that are not loaded yet. The server writes it.

import { send } from '../../lib/api.js';
import { html, useState } from '../../lib/html.js';
import { save } from '../../lib/save.js';
import { Failure } from '../../parts/common.js';
import { ONLY_HERE } from './columns.js';

const WITHIN_MS = 300000;

// query: of the list, without its columns. names: of the columns.
export function Export({ query, names }) {
  const [state, setState] = useState({});
  const columns = ['name', 'variant', ...names.filter((name) => !ONLY_HERE.includes(name))].join(',');
  const write = async (format) => {
    setState({ isBusy: true });
    try {
      save(`jobs.${format}`, await send('GET', 'v1/job-table', { query: { ...query, columns, format }, within: WITHIN_MS, bodyWithin: WITHIN_MS, read: (response) => response.blob() }));
      setState({});
    } catch (error) {
      setState({ error });
    }
  };
  return html`<button disabled=${state.isBusy} onClick=${() => write('csv')}>Save as CSV</button><button disabled=${state.isBusy} onClick=${() => write('parquet')}>Save as Parquet</button>
    ${state.isBusy && html`<span class="soft" role="status">The server writes the file …</span>`}<${Failure} error=${state.error} />`;
}
