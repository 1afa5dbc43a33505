"""Parameter servers: ranks with the weights and the optimizer, and the workers' side of them."""
