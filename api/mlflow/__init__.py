"""The read calls of MLflow's REST API for tracking."""
