"""The catalogue of checkpoints, and jobs that start from another job's checkpoint."""
