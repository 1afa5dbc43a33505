"""The forkserver of a node: its server, its client, its manager, and the processes it forks."""
