"""What dray's loop costs on a GPU."""
