"""System metrics: samples of the resource usage of ranks and their node, taken by the node's
agent."""
