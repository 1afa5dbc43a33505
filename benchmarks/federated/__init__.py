"""The number of rounds that federated algorithms need if clients are as different as possible, and
the duration of rounds."""
