// Everything that a page can do to another origin. Returns what the page could read.
async ([base, job, artifact]) => {
  const seen = [];
  const tried = [];
  const attempt = (name, work) => tried.push(work().then((found) => {
    if (found) seen.push(`${name}: ${String(found).slice(0, 80)}`);
  }, () => {}));
  const add = (tag, fields) => {
    const element = Object.assign(document.createElement(tag), fields);
    document.body.append(element);
    return element;
  };
  const loads = (tag, fields) => new Promise((resolve, reject) => {
    add(tag, { ...fields, onload: () => resolve(tag), onerror: reject });
  });
  const paths = ['v1/jobs', `v1/jobs/${job}`, `v1/jobs/${job}/logs/text`, artifact, 'metrics', 'session'];
  for (const url of paths.map((path) => base + path)) {
    for (const mode of ['cors', 'no-cors']) {
      attempt(`fetch ${mode} ${url}`, async () => (await fetch(url, { mode, credentials: 'include' })).text());
    }
    attempt(`image ${url}`, () => loads('img', { src: url }));
    attempt(`script ${url}`, () => loads('script', { src: url }));
    attempt(`style sheet ${url}`, () => loads('link', { rel: 'stylesheet', href: url }));
    attempt(`frame ${url}`, () => new Promise((resolve) => {
      const frame = add('iframe', { src: url });
      frame.onload = () => {
        try {
          resolve(frame.contentDocument.body.innerText);
        } catch {
          resolve(null);
        }
      };
    }));
  }
  attempt('events', () => new Promise((resolve, reject) => {
    const source = new EventSource(`${base}v1/jobs/${job}/events`, { withCredentials: true });
    source.onopen = () => resolve('open');
    source.onmessage = (message) => resolve(message.data);
    source.onerror = () => {
      source.close();
      reject();
    };
  }));
  const writes = [
    ['POST', 'v1/jobs', '{"recipe": "image_classification"}'],
    ['POST', `v1/jobs/${job}/cancel`, ''],
    ['POST', `v1/jobs/${job}/downloads`, '{"log": {}}'],
    ['POST', 'session', ''],
    ['DELETE', `v1/jobs/${job}`, ''],
    ['DELETE', 'session', ''],
  ];
  for (const [method, path, body] of writes) {
    for (const type of ['text/plain', 'application/json']) {
      for (const more of [{}, { 'X-Dray-Write-Key': 'x' }]) {
        const headers = { 'Content-Type': type, ...more };
        attempt(`${method} ${path}`, async () => (await fetch(base + path, { method, body, headers, credentials: 'include' })).text());
      }
    }
    attempt(`no-cors ${method} ${path}`, async () => (await fetch(base + path, { method, body, mode: 'no-cors', credentials: 'include' })).text());
    if (method !== 'POST') continue;
    navigator.sendBeacon(base + path, body);
    attempt(`form ${path}`, () => new Promise((resolve) => {
      const target = add('iframe', { name: `target ${path}` });
      const form = add('form', { method, action: base + path, target: target.name, enctype: 'text/plain' });
      form.append(Object.assign(document.createElement('input'), { name: body.slice(0, -1), value: '}' }));
      target.onload = () => resolve(null);
      form.submit();
    }));
  }
  // A frame whose navigation was refused might never report that it was loaded.
  await Promise.race([Promise.allSettled(tried), new Promise((resolve) => setTimeout(resolve, 10000))]);
  return seen;
}
