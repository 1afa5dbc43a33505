"""The cost of system metrics: of a sample on a node, and of storing it."""
