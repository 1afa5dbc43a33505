"""The process of a rank, from its first line to its exit code."""
