"""The training loop of one rank of a recipe, and what it measures and reports."""
