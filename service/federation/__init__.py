"""Federated jobs with clients outside the cluster: their tokens, rounds and updates."""
