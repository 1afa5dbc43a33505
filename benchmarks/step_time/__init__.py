"""What a step of dray's loop costs, against a plain DDP loop that reports nothing."""
