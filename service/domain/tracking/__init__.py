"""Search and comparison of jobs: search grammars, and documents as values by JSON pointer."""
