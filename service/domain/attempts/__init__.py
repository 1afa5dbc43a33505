"""Attempts: their retries, the use of their time, and drills."""
