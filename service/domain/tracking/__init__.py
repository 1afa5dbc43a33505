"""Search and comparison of jobs: parsers for search expressions, and the values of documents by
JSON pointer."""
