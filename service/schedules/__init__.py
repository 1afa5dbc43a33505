"""Schedules, which submit a job again and again at the times of a cron expression."""
