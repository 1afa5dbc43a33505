"""A user's own program: how soon it runs, and the cost of its steps; Ray jobs and torchrun."""
