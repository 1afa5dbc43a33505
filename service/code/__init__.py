"""Uploaded code of jobs. Code is stored in parts, by hash and separately for each owner."""
