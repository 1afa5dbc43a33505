"""Uploaded code of jobs. Uploaded code. It is stored in parts by hash, separately for each
owner."""
