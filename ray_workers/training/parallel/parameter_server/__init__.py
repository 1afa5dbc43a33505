"""Parameter servers, which hold the weights and the optimizer state, and the workers' side."""
