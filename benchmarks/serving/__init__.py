"""The cost of the service: requests by number of jobs, status, metrics, and many onlookers."""
