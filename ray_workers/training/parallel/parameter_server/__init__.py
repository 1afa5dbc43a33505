"""Parameter servers, which store the weights and the optimizer state, and the workers that use
them."""
