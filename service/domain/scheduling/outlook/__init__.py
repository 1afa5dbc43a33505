"""Simulations of the policy, which predict when jobs will start, and which changes would make them
start sooner."""
