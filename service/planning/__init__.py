"""The planner: determines which divisions of a model fit the cluster, and the memory and step time
of each."""
