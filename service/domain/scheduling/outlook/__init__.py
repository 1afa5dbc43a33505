"""Simulations of the policy. They predict when jobs will start, and what changes would make the
jobs start sooner."""
