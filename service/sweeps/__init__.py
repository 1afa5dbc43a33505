"""Sweeps: making their trials, and asking Optuna for parameters."""
