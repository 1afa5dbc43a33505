"""What runs once on each node: the agent, its forkserver, and what they look after."""
