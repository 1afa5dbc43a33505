"""Metrics that a script does not report itself, read from its output and its loggers' files."""
