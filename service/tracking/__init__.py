"""Jobs as runs of MLflow."""
