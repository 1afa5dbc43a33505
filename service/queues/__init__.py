"""Queues: their rules, the jobs that they admit, and the slots that these jobs hold."""
