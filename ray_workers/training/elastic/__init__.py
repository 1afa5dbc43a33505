"""Ranks that meet, leave and replace each other: rendezvous, process groups, state transfer."""
