"""The cost of a step of dray's loop, against a plain DDP loop that reports nothing."""
