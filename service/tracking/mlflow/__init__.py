"""Jobs as MLflow runs, which a separate process writes and MLflow's client can read."""
