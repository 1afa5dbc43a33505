"""`federated` in a job document: its fields, and conflicts between options."""
