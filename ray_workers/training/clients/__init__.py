"""Clients of federated jobs that have their own data: ranks of silos, and processes outside the
cluster."""
