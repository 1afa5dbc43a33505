"""How a job changes: the one transition function, preemption and resizing."""
