"""Pure rules on plain data: states, retries, the scheduling policy, metric series. The rules
perform no I/O and read no clock."""
