"""The training loop of one rank, from its first line to its exit code."""
