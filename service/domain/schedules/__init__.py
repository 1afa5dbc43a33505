"""Recurring jobs: the times of a cron expression, and what happens at these times."""
