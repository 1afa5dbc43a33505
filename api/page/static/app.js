// The shell of the page: the bar at the top, notices, and the view that the address names.

import { address, link } from './lib/address.js';
import { asksForToken, connection, hasToken } from './lib/api.js';
import { duration } from './lib/format.js';
import { html, render, useEffect, useErrorBoundary, useRef, useState } from './lib/html.js';
import { repeat, useNow } from './lib/live.js';
import { useStore } from './lib/stores.js';
import { Loading } from './parts/common.js';
import { isJobId } from './parts/job_parts.js';
import { SignIn, SignOut } from './parts/sign_in.js';
import { Jobs } from './views/jobs.js';

const later = {
  job: () => import('./views/job.js').then((module) => module.JobPage),
  cluster: () => import('./views/cluster.js').then((module) => module.ClusterPage),
  submit: () => import('./views/submit.js').then((module) => module.SubmitPage),
  compare: () => import('./views/compare.js').then((module) => module.ComparePage),
  models: () => import('./views/models.js').then((module) => module.ModelsPage),
  experiments: () => import('./views/experiments.js').then((module) => module.ExperimentsPage),
  diff: () => import('./views/diff.js').then((module) => module.DiffPage),
  views: () => import('./views/jobs/saved_views.js').then((module) => module.OpenView),
  reports: () => import('./views/reports.js').then((module) => module.ReportsPage),
};
const PLACES = [['jobs', 'Jobs'], ['experiments', 'Experiments'], ['models', 'Models'], ['reports', 'Reports'], ['cluster', 'Cluster'], ['submit', 'Submit']];
const TITLES = { ...Object.fromEntries(PLACES), compare: 'Compare', diff: 'What changed', views: 'View' };
// Views that belong to the list of jobs.
const OF_JOBS = ['job', 'compare', 'diff', 'views'];
// Places with a view of one object.
const OF_ONE = ['models', 'experiments', 'reports'];

function placeOf([first, second]) {
  if (!first || (first === 'jobs' && !second)) return 'jobs';
  if (first === 'jobs') return 'job';
  return Object.hasOwn(later, first) ? first : null;
}

function View({ path }) {
  const place = placeOf(path);
  const [loaded, setLoaded] = useState({ jobs: Jobs });
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    if (!place || loaded[place]) return;
    later[place]().then(
      (component) => setLoaded((was) => ({ ...was, [place]: component })),
      () => setFailed(true),
    );
  }, [place]);
  if (!place || (place === 'job' && !isJobId(path[1]))) {
    return html`<h1>There is no ${place ? 'job with this id' : 'such page'}</h1><p><a href="#/jobs">Go to the jobs</a></p>`;
  }
  const Component = loaded[place];
  if (Component) return html`<${Guarded} key=${place + (path[1] ?? '')}><${Component} path=${path} /><//>`;
  return failed ? html`<${Awaiting} />` : html`<${Loading} />`;
}

const Anew = () => html`<p class="empty" role="alert">This part of the page can't be shown: the server can't be reached, or was upgraded.
  <button onClick=${() => location.reload()}>Reload the page</button></p>`;

// A view that could not be loaded. The browser can keep the failure of a module, so the page is loaded anew as
// soon as the server answers.
function Awaiting() {
  useEffect(() => {
    const controller = new AbortController();
    repeat(async (signal) => {
      const answer = await fetch(document.baseURI, { method: 'HEAD', cache: 'no-store', signal });
      if (answer.ok) location.reload();
      return answer.ok;
    }, { every: 2000, signal: controller.signal });
    return () => controller.abort();
  }, []);
  return html`<p class="empty" role="alert">The server can't be reached. This part of the page will be shown when the server is back.</p>`;
}

// Catches errors in a view, such as an unexpected response, so that the rest of the page still works.
function Guarded({ children }) {
  const [error] = useErrorBoundary(console.error);
  return error ? html`<${Anew} />` : children;
}

function Lost() {
  const { lost, since } = useStore(connection);
  const now = useNow();
  if (!lost) return null;
  // A screen reader reads the notice once, not every second.
  return html`<div class="lost" role="alert">The server has not answered<span aria-hidden="true"> for ${duration(Math.max(1, Math.round((now - since) / 1000)))}</span>.
    The page shows the last known state. It will update when the server is back.</div>`;
}

function App() {
  const { path } = useStore(address);
  const asked = useStore(asksForToken);
  const signedIn = useStore(hasToken);
  const place = OF_JOBS.includes(placeOf(path)) ? 'jobs' : placeOf(path);
  const nav = useRef(null);
  // The view of one object sets the title itself.
  const isOfOne = placeOf(path) === 'job' ? isJobId(path[1]) : Boolean(path[1]) && OF_ONE.includes(place);
  useEffect(() => scrollTo(0, 0), [path.join('/')]);
  useEffect(() => {
    if (!isOfOne) document.title = `${TITLES[placeOf(path)] ?? 'Not found'} - dray`;
  }, [placeOf(path), isOfOne]);
  // A phone shows only some of the places.
  useEffect(() => nav.current.querySelector('[aria-current]')?.scrollIntoView({ block: 'nearest', inline: 'center' }), [place]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.getElementById('content').focus(); }}>Skip to the content</a>
    <header class="top"><a class="brand" href=${link(['jobs'])}>dray</a>
      <nav aria-label="Pages" ref=${nav}>${PLACES.map(([name, title]) => html`<a key=${name} href=${link([name])} aria-current=${place === name ? 'page' : undefined}>${title}</a>`)}
        <a href="manual/" target="_blank" rel="noopener">Manual</a>
        <a href="docs" target="_blank" rel="noopener">API</a></nav>
      ${signedIn && html`<${SignOut} />`}
    </header>
    <${Lost} />
    ${asked ? html`<${SignIn} message=${asked} />` : html`<main id="content" tabindex="-1"><${View} path=${path} /></main>`}`;
}

const root = document.getElementById('app');
root.textContent = '';
render(html`<${App} />`, root);
