"""Self-tests of a node: the GPUs that no job uses, or the processors."""
