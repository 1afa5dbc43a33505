"""The read-only calls of MLflow's REST API for tracking."""
