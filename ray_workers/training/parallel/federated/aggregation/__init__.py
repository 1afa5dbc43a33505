"""Combines the updates of a round: which updates count, their combination, and what is kept."""
