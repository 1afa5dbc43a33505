"""Modules that all loops share: the fenced database, the loops' view of jobs, and their timings."""
