"""Federated learning: a round of clients as a step of the job, wherever the clients are."""
