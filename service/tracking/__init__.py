"""Comparing jobs, experiments, and what people write about jobs."""
