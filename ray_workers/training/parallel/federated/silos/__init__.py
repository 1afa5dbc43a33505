"""Silos: clients that are ranks with data of their own, and the rank that aggregates."""
