"""Connections between processes of one attempt, and who is at the other end."""
