"""Data sources: local files, HTTP and S3, and the cache of each node."""
