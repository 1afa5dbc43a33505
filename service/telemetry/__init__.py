"""Metrics and logs as chunks: writing them as they arrive, and reading them for the API."""
