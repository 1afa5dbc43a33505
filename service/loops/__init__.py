"""The service's background loops: read, decide, apply. Only one process at a time runs the
loops."""
