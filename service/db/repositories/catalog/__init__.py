"""SQL for listing, searching, tagging and grouping jobs, including for MLflow."""
