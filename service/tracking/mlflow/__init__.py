"""Jobs as runs of MLflow: written by a separate process, and read by MLflow's client."""
