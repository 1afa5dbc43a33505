"""Watches the queue and the cluster, makes plans, and carries them out."""
