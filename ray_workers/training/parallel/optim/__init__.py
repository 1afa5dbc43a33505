"""Optimizers, the optimizer step, and optimizer state that is kept off the device."""
