"""The recipes' networks. Each file documents the shapes of its network's inputs and outputs."""
