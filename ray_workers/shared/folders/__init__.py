"""Folders of a node that several rooms know by their places."""
