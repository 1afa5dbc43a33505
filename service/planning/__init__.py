"""The planner: which divisions of a model fit a cluster, and their memory and time."""
