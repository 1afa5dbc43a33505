"""Simulations of the policy: when jobs will start, and which changes would start them sooner."""
