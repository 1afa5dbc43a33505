"""`federated` in a job document: its fields, and what they can't be together with."""
