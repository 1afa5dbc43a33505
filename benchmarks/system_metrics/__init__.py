"""The cost of system metrics: taking a sample on a node, and storing it."""
