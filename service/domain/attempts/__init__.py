"""Attempts: retries, the use of their time, and drills."""
