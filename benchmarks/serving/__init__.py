"""The cost of the service: requests by number of jobs, status requests, metrics, and many
observers."""
