"""Metrics of jobs in TensorBoard: its event files, and their writer."""
