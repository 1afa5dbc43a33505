"""The sizes of jobs that may have more or fewer workers."""
