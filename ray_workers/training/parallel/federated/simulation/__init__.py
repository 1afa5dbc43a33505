"""Simulation of federated learning: the ranks simulate the clients, whose data are parts of the
job's data set."""
