"""The uploaded code of jobs. Code is stored in parts that are identified by their hashes,
separately for each owner."""
