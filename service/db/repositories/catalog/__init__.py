"""SQL to list, search, tag and group jobs, also for MLflow."""
