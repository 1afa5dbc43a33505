"""Folders on a node that several packages use."""
