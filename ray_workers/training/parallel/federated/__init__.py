"""Federated learning: a round of clients is a step of the job, wherever the clients are."""
