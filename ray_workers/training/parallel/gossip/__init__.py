"""Each rank has its own copy of the model, and averages it with the copies of its neighbours."""
