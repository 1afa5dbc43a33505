"""Runs a user's own training program as a rank, with the variables required by its framework."""
