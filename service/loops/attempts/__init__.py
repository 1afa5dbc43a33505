"""Follows started attempts, sends them commands, and stores their replies."""
