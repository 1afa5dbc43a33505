"""The same numbers, whichever way a model is divided."""
