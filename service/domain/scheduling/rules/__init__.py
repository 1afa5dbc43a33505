"""The rules that determine which jobs come first, are blocked or release slots, and the messages of
these rules."""
