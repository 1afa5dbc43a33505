"""What the ranks send of their gradients, as the kernel counts it."""
