"""Rounds that federated algorithms take where clients differ most, and rounds beside Flower."""
