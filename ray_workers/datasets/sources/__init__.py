"""Where data come from: local files, HTTP and S3, and the cache of each node."""
