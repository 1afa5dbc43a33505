"""The time from submission to the first optimizer step, compared with Ray Train and torchrun."""
