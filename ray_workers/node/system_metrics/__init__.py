"""System metrics: what the ranks of an attempt use, and their node, sampled by the node's agent."""
