"""Changes of a job: the one transition function, preemption and resizing."""
