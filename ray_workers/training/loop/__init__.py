"""The training loop of one rank of a recipe, with its measurements and reports."""
