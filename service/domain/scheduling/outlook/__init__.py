"""The policy played forward: when jobs will start, and what would have them start sooner."""
