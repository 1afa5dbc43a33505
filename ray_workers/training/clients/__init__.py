"""Clients of federated jobs that have data of their own: ranks of silos, and processes outside of
the cluster."""
