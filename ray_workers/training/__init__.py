"""Training on one rank: pure torch, the same under Ray, in a test or by hand."""
