"""Folders of a node whose paths several packages need."""
