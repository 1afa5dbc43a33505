"""Pure rules on plain data: states, retries, the scheduling policy, metric series. No I/O and no
clock."""
