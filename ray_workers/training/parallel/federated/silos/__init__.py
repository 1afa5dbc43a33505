"""Silos: clients that are ranks with their own data, and the rank that aggregates."""
