"""Texts and numbers from users, sent into a server in every way and read back in every other."""
