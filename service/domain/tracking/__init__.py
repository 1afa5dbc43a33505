"""Searching and comparing jobs: the grammar of searches, and documents as values by place."""
