"""SQL for listing, searching, tagging and grouping jobs, also for MLflow."""
