"""A batch 32 times as large learns as well, with the rules for it."""
