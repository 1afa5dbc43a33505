"""Recurring jobs: the times of a cron expression, and which of them get a run."""
