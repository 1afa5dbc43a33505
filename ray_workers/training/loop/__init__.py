"""The training loop of one rank of a recipe, and its measurements and reports."""
