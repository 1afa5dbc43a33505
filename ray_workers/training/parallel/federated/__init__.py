"""Federated learning: a round of clients is a step of the job, regardless of where the clients
run."""
