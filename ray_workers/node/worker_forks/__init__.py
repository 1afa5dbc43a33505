"""Worker processes of an embedded Ray are forked from a process that has Ray imported."""
