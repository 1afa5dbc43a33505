"""System metrics: the node's agent samples what the ranks of an attempt use, and their node."""
