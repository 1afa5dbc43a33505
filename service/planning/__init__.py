"""The planner: which divisions of a model fit the cluster, and their memory and time."""
