"""Texts and numbers of users, through each door of a server and out of each other."""
