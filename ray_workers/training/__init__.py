"""Training on one rank, in pure torch: the same under Ray, in a test or by hand."""
