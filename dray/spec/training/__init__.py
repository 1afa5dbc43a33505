"""How a recipe trains: data, optimizer, division of the model, and copies kept in step."""
