"""Changes of jobs: state transitions, claims, preemption and resizing."""
