"""The slots that jobs get: requests, the scheduling policy, changes of size."""
