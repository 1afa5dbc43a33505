"""Validation of user input: names, numbers with units, patterns, and whole documents."""
