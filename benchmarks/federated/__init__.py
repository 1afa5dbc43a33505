"""Rounds that federated algorithms need if clients differ most, and rounds compared with Flower."""
