"""Federated jobs whose clients are outside of the cluster: their tokens, rounds and updates."""
