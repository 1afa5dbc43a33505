"""The training of a recipe: data, optimizer, division and synchronisation of the model."""
