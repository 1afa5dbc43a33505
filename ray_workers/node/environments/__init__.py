"""Environments on a node: built by uv, kept, and removed when room is needed."""
