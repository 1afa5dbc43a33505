"""Connections between processes of one attempt, and checks of the other end."""
