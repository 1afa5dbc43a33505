"""The agent and the forkserver of a node, and the files and processes that they manage."""
