"""Forks the worker processes of an embedded Ray from a process that has already imported Ray."""
