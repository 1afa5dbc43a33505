// The list of jobs as an address, as a query of the API, and as the query of a saved view.

// Filters for which the page has no field: they come from links and saved views, and each is shown as a button
// that removes it.
export const OTHERS = {
  owner: 'owner', project: 'project', name: 'name', name_glob: 'name like', id_prefix: 'id', array: 'array', array_index: 'index', schedule: 'schedule', reservation: 'reservation',
  created_after: 'submitted since', created_before: 'submitted before',
};
const SHOWN = ['sort', 'columns', 'group'];
const TITLES = { ...OTHERS, state: 'states', label: 'labels', where: 'search', text: 'name or id', sort: 'order' };

export const withoutEmpty = (query) => Object.fromEntries(Object.entries(query).filter(([, value]) => ![null, undefined, ''].includes(value) && value.length !== 0));

// The filter that the parameters of an address describe.
export function queryOf(params) {
  const text = (params.get('text') || '').trim();
  const query = { state: params.getAll('state'), queue: params.get('queue'), label: params.getAll('label'), where: params.get('where') };
  for (const name of Object.keys(OTHERS)) if (params.get(name)) query[name] = params.get(name);
  if (query.array_index) query.array_index = Number(query.array_index);
  if (params.get('mine')) query.owner = '@me';
  if (/^job-[0-9a-z]*$/.test(text)) query.id_prefix = text;
  else if (/^array-[0-9a-z]*$/.test(text)) query.array = text;
  else if (text) query.text = text;
  return query;
}

// The query of a saved view for the parameters of an address.
export function savedOf(params) {
  return withoutEmpty({ ...queryOf(params), ...Object.fromEntries(SHOWN.map((name) => [name, params.get(name)])) });
}

// The parameters of an address for the query of a saved view. The page lists each job of an array.
export function paramsOf({ owner, collapse_arrays: _, ...query }) {
  return { ...query, ...(owner === '@me' ? { mine: '1' } : { owner }) };
}

// What differs between the queries of two views, as words.
export function differences(one, other) {
  const plain = ({ collapse_arrays: _, ...query }, name) => JSON.stringify([].concat(query[name] ?? []).map(String).sort());
  return [...new Set([...Object.keys(one), ...Object.keys(other)])].filter((name) => plain(one, name) !== plain(other, name)).map((name) => TITLES[name] ?? name);
}
