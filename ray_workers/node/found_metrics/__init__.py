"""Metrics that a script doesn't report itself, read from its output and from its loggers' files."""
