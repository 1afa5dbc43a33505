"""The processes that run once on each node: the agent, its forkserver, and what they look after."""
