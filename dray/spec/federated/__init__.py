"""`federated` in a job document: its fields, and the options that conflict with them."""
