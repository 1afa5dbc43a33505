"""Expected starts and ends, what would change them, and decisions that can be replayed."""
