"""Training on one rank in plain PyTorch, which runs in the same way under Ray, in a test, and when
started manually."""
