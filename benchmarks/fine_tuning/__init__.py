"""Tokens per second of fine-tuning, and the time to its first step, compared with TRL."""
