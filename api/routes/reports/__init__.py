"""Routes of what a job reports and leaves: events, metrics, logs, checkpoints and results."""
