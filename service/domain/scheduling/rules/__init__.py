"""The rules for which job comes first, is blocked or makes room, and their messages."""
