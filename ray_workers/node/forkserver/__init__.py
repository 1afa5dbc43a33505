"""A node's forkserver: its server, client and manager, and the processes that it forks."""
