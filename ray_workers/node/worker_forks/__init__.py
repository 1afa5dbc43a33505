"""Forking of an embedded Ray's worker processes from a process that has already imported Ray."""
