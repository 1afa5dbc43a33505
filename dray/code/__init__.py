"""The code that a job brings along: which files are packed, and how an upload is described."""
