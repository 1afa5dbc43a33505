"""Training on one rank in plain PyTorch. It runs in the same way under Ray, in a test, and when
started manually."""
