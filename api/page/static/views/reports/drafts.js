// Drafts of reports, which this tab keeps until they are saved or discarded.

const PREFIX = 'dray.report.';

export const DRAFTS = {
  // The draft of the report with this id, or of a new report (`new`): {title, text, version}, or null.
  read(key) {
    try {
      return JSON.parse(sessionStorage.getItem(PREFIX + key));
    } catch {
      return null;
    }
  },
  write(key, draft) {
    sessionStorage.setItem(PREFIX + key, JSON.stringify(draft));
  },
  remove(key) {
    sessionStorage.removeItem(PREFIX + key);
  },
};
