"""The queue and the cluster are watched, plans are made, and what they say is done."""
