"""Which division of a model fits a cluster, and what it costs."""
