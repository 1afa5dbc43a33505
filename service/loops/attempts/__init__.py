"""Follows started attempts, sends commands to them, and stores their replies."""
