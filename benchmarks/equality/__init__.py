"""Checks that a model computes the same numbers, no matter how it is divided."""
