"""Environments on a node: built by uv, cached, and removed when space is needed."""
