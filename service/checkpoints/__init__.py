"""The catalogue of checkpoints, and jobs that begin from the checkpoint of another."""
