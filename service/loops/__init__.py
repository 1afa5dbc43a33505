"""The loops of the service: read, decide, apply. One process at a time runs them."""
