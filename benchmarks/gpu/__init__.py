"""The overhead of dray's loop on a GPU."""
