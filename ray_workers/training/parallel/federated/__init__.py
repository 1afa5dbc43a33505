"""Federated learning: a round of clients is a step of the job, no matter where the clients are."""
