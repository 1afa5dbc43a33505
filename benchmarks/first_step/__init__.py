"""The time from submit to the first optimizer step, against Ray Train and torchrun."""
