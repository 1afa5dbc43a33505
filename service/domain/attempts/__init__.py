"""Attempts: what follows when one ends, how its time counts, drills against it."""
