"""The code that jobs bring along: uploads, kept in parts by their hash, one owner's apart from all
others'."""
