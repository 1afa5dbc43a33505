"""Simulation of federated learning: the ranks simulate the clients, each of which has a part of the
job's data set."""
