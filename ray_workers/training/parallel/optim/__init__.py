"""Optimizers, the optimizer step, and optimizer state that is stored off the device."""
