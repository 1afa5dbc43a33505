"""Aggregation of a round's updates: which updates count, how they are combined, and the state that
is kept between rounds."""
