"""Attempts that were started: they are followed, told commands, and their replies are stored."""
