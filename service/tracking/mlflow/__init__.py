"""Jobs as runs of MLflow: written by a process of its own, and read by MLflow's client."""
