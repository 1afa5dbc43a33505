"""Stores metrics and logs in chunks as they arrive, and reads them for the API."""
