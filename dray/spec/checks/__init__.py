"""Validation of a job document across its parts. Each check raises the first error that it
finds."""
