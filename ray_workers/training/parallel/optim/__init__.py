"""Optimizers, the optimizer step, and optimizer state in host memory or in fewer bits."""
