"""The planner: which divisions of a model fit a cluster, and what they cost."""
