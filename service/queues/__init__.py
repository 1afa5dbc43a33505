"""Queues: their rules, the jobs they admit, and the slots these jobs hold."""
