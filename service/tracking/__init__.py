"""Comparing jobs, experiments, tags and notes, and exporting jobs to MLflow as runs."""
