"""Changes to jobs: state transitions, claims, preemption and resizing."""
