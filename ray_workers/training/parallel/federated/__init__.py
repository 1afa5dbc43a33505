"""Federated learning in simulation: rounds of clients, their training, and the server's step."""
