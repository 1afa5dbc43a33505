"""Networks of the recipes; each file states the shapes of inputs and outputs."""
