"""A user's own training program as a rank: running it, and what its framework looks for."""
