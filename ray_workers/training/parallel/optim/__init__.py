"""Optimizers, the optimizer step, and optimizer state that is stored in host memory or in fewer
bits."""
