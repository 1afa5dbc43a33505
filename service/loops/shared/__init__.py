"""Modules shared by all loops: the fenced database, the loops' view of jobs, and the timings."""
