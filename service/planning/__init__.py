"""The planner, which determines the divisions of a model that fit the cluster, and their memory and
step time."""
