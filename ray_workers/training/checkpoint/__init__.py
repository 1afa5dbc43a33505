"""Writes checkpoints, and finds the latest intact checkpoint."""
