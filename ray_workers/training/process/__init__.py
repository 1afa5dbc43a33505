"""The process of a rank, from its start to its exit code."""
