"""SQL for queues, the cluster, costs, forecasts, decisions, and the lease of the loops."""
