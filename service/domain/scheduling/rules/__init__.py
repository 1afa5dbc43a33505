"""The rules for which jobs come first, are blocked or make room, and their messages."""
