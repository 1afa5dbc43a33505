"""The table of nodes, quarantined slots, and the capabilities of GPUs."""
