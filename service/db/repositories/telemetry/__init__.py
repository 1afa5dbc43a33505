"""SQL for metrics and logs of jobs, system metrics of their ranks, and the service's own
metrics."""
