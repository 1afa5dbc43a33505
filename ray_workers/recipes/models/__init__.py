"""The recipes' networks. Each file documents the shapes of inputs and outputs."""
