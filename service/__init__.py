"""The service decides what runs where, owns the database, and is the only package that drives
Ray."""
