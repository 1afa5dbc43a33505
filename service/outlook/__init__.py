"""Expected starts and ends, changes that would affect them, and decisions that can be replayed."""
