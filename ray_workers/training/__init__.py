"""Training on one rank in plain PyTorch, which runs in the same way under Ray, in a test, or when
started manually."""
