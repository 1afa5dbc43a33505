"""Metrics and logs as chunks: writes them as they arrive, and reads them for the API."""
