"""SQL on metrics and logs of jobs, what their ranks use, and what the service measures."""
