"""A checker of the prose in code and documentation, by the lists in `words.toml`."""
