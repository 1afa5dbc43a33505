"""Queues: their rules, the jobs that they admit, and what those hold."""
