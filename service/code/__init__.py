"""Uploaded code of jobs, which is stored in parts by hash, separately for each owner."""
