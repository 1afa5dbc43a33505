"""Checks that a model computes the same numbers, however it is divided."""
