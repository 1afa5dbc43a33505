"""How a recipe trains: data, optimizer, division and synchronisation of the model."""
