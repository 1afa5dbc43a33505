"""The step of each way to train on several ranks, against a plain torch program of the same."""
