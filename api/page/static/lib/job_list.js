// The list of jobs: pages that are loaded as the reader comes to them, and asked for again while they
// are in view. Jobs are in the order of their ids, newest first, so an answer says all about the part
// of the list that it covers: what it does not have is gone there.

import { get } from './api.js';
import { Store } from './stores.js';

const PAGE = 50;

export class JobList {
  constructor(query) {
    this.query = query;
    this.jobs = [];
    // Where pages begin: {cursor, after}. The first begins at the top, which moves as jobs come.
    this.pages = [{ cursor: null, after: null }];
    this.next = null;
    this.loaded = new Store(null);
    this.loading = false;
  }

  // Ask again for the pages that have the rows `first` to `last`.
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
    const answer = await get('v1/jobs', { ...this.query, brief: true, limit: PAGE, cursor: page.cursor }, signal);
    if (signal?.aborted) return;
    const index = this.pages.indexOf(page);
    const following = this.pages[index + 1];
    const { items, next_cursor: next } = answer;
    const end = next ? items.at(-1).id : '';
    const above = page.after ? this.jobs.filter((job) => job.id >= page.after) : [];
    this.jobs = [...above, ...items, ...this.jobs.filter((job) => job.id < end)];
    if (!following) this.next = next ?? null;
    // Jobs that have come since have moved the end of this page up: what is below is another page.
    else if (next && end > following.after) this.pages.splice(index + 1, 0, { cursor: next, after: end });
    else if (!next) {
      this.pages.length = index + 1;
      this.next = null;
    }
    this.loaded.set({ count: this.jobs.length });
  }

  // Show the answer to a change at once.
  replace(job) {
    this.jobs = this.jobs.map((other) => (other.id === job.id ? job : other));
    this.loaded.set({ count: this.jobs.length });
  }
}
