"""Metrics that a script does not report itself, taken from its output and its loggers' files."""
