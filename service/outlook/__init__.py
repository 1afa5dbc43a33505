"""Forecasts of starts and ends, changes that would affect them, and replayable decisions."""
