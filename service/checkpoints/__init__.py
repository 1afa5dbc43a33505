"""The catalogue of checkpoints, and initializing jobs from another job's checkpoint."""
