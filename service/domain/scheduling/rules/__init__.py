"""The rules: which job comes first, is kept back, or makes room, and the sentences on it."""
