"""Connections between an attempt's processes, and checks of the other end."""
