"""Search and comparison of jobs: the grammars of searches, and documents as values by pointer."""
