"""The step time of each way to train on several ranks, compared with an equivalent plain torch
program."""
