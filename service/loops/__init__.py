"""The loops of the service, of which one process at a time runs each: read, decide, apply."""
