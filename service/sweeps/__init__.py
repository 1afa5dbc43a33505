"""Sweeps: creating their trials, and asking Optuna for parameters."""
