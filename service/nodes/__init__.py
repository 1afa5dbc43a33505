"""The nodes: their table, quarantine, and the abilities of their GPUs."""
