"""Checks that a batch 32 times as large reaches the same accuracy with the rules for large
batches."""
