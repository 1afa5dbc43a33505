"""What the service costs: requests by number of jobs, status, metrics, and many who look on."""
