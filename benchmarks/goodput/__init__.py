"""The share of the time in which a job trains although its ranks are killed repeatedly."""
