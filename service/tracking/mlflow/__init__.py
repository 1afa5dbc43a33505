"""Jobs as MLflow runs: a separate process exports them to an MLflow server, and MLflow's client can
read them from dray."""
