"""Sweeps: making their trials, asking Optuna for values, and showing trials with the best."""
