"""Metrics and logs as chunks: writing them when they come in, reading them for the API."""
