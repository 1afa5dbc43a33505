"""Federated jobs with clients outside of the cluster: their tokens, rounds and updates."""
