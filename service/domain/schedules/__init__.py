"""Recurring jobs: the times of a cron expression, and which of these times get a run."""
