"""The cost of dray's loop on a GPU."""
