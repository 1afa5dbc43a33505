"""Pure rules on plain data: states, retries, the scheduling policy, series. No I/O, no clock."""
