"""A user's program: how soon it runs, and the duration of its steps, compared with Ray jobs and
torchrun."""
