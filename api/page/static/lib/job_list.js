// The list of jobs, in pages that are loaded as the reader scrolls to them, and refreshed while they
// are in view.

import { get } from './api.js';
import { Store } from './stores.js';

const PAGE = 50;

// Jobs in the order of their ids, newest first, so an answer is complete for the part of the list that it
// covers: jobs that are missing from it were deleted.
export class JobList {
  constructor(query) {
    this.query = query;
    this.jobs = [];
    // The starts of pages: {cursor, after}. The first page begins at the top of the list, where new jobs
    // appear.
    this.pages = [{ cursor: null, after: null }];
    this.next = null;
    this.loaded = new Store(null);
    this.loading = false;
  }

  // Reload the pages with the rows `first` to `last`.
  async refresh(first, last, signal) {
    const low = this.jobs[first]?.id;
    const high = this.jobs[last]?.id;
    for (const page of [...this.pages]) {
      const index = this.pages.indexOf(page);
      const end = this.pages[index + 1]?.after;
      const isBelow = low && end && end > low;
      const isAbove = high && page.after && page.after <= high;
      if (index >= 0 && !isBelow && !isAbove) await this.load(page, signal);
    }
  }

  async more(signal) {
    if (!this.next || this.loading) return;
    this.loading = true;
    try {
      const page = { cursor: this.next, after: this.jobs.at(-1).id };
      this.pages.push(page);
      await this.load(page, signal);
    } finally {
      this.loading = false;
    }
  }

  async load(page, signal) {
    const answer = await read(this.query, page.cursor, signal);
    if (signal?.aborted) return;
    const index = this.pages.indexOf(page);
    const following = this.pages[index + 1];
    const { items, next_cursor: next } = answer;
    const end = next ? items.at(-1).id : '';
    const above = page.after ? this.jobs.filter((job) => job.id >= page.after) : [];
    this.jobs = [...above, ...items, ...this.jobs.filter((job) => job.id < end)];
    if (!following) this.next = next ?? null;
    // New jobs at the top have pushed older jobs off this page, so these older jobs become another page.
    else if (next && end > following.after) this.pages.splice(index + 1, 0, { cursor: next, after: end });
    else if (!next) {
      this.pages.length = index + 1;
      this.next = null;
    }
    this.loaded.set({ count: this.jobs.length });
  }

  // Show the answer to a change at once.
  replace(job) {
    this.jobs = this.jobs.map((other) => (other.id === job.id ? { ...other, ...job, values: other.values } : other));
    this.loaded.set({ count: this.jobs.length });
  }
}

// Jobs in the order of a column. A job whose value has changed can be on two pages: the first one counts.
export class SortedJobs extends JobList {
  constructor(query) {
    super(query);
    this.parts = []; // the pages: {cursor, items, next}
  }

  // Reload the pages from the row `first` on, up to the row `last`. Those below are loaded again as the reader
  // scrolls to them, since they may begin elsewhere now.
  async refresh(first, last, signal) {
    if (this.loading) return;
    let [index, row] = [0, 0];
    while (index < this.parts.length - 1 && row + this.parts[index].items.length <= first) {
      row += this.parts[index].items.length;
      index += 1;
    }
    const parts = this.parts.slice(0, index);
    let cursor = parts.at(-1)?.next ?? null;
    do {
      const { items, next_cursor: next } = await read(this.query, cursor, signal);
      if (signal?.aborted) return;
      parts.push({ items, next: next ?? null });
      row += items.length;
      cursor = next ?? null;
    } while (cursor && row <= last);
    this.show(parts);
  }

  async more(signal) {
    if (!this.next || this.loading) return;
    this.loading = true;
    try {
      const before = this.parts;
      const { items, next_cursor: next } = await read(this.query, this.next, signal);
      if (this.parts === before && !signal?.aborted) this.show([...before, { items, next: next ?? null }]);
    } finally {
      this.loading = false;
    }
  }

  show(parts) {
    const known = new Set();
    this.parts = parts;
    this.jobs = parts.flatMap(({ items }) => items).filter(({ id }) => !known.has(id) && known.add(id));
    this.next = parts.at(-1).next;
    this.loaded.set({ count: this.jobs.length });
  }
}

const read = (query, cursor, signal) => get('v1/jobs', { ...query, brief: true, limit: PAGE, cursor }, signal);
