"""Comparing jobs, experiments, what people write about jobs, and jobs as runs of MLflow."""
