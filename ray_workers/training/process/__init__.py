"""The process of a rank, from start to exit code."""
