"""A node's agent and forkserver, and the files and processes they manage."""
