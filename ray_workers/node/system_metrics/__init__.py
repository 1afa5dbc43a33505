"""System metrics: the node's agent samples the resources that ranks and their node use."""
