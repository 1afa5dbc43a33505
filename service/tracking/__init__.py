"""Comparisons of jobs, experiments, tags and notes, and jobs as runs of MLflow."""
