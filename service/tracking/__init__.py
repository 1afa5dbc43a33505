"""Comparisons of jobs, experiments, tags and notes, and jobs as MLflow runs."""
