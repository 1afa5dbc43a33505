"""The code of jobs: uploads, stored in parts by their hash, separately for each owner."""
