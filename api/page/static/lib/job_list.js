// The list of jobs, in pages that are loaded as the reader scrolls to them, and refreshed while they
// are in view. Jobs are ordered by their ids, newest first, so an answer is complete for the part of
// the list that it covers: jobs that are missing from it were deleted.

import { get } from './api.js';
import { Store } from './stores.js';

const PAGE = 50;

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
    const answer = await get('v1/jobs', { ...this.query, brief: true, limit: PAGE, cursor: page.cursor }, signal);
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
    this.jobs = this.jobs.map((other) => (other.id === job.id ? job : other));
    this.loaded.set({ count: this.jobs.length });
  }
}
