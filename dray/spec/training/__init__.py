"""The training of a recipe: data, optimizer, division of the model, copies kept in step."""
