"""Attempts: retries, how their time is used, and drills."""
