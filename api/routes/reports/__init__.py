"""Routes for the reports and results of jobs: events, metrics, logs, checkpoints, artifacts."""
