"""Parameter servers: ranks that hold the weights and the optimizer, and the workers' side of it."""
