"""The step time of dray's loop, compared with a plain DDP loop that reports nothing."""
