"""The brain: it decides what runs where, owns the database, and alone drives Ray."""
