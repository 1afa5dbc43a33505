"""Checks of what users write: names, numbers with units, patterns, and whole documents."""
