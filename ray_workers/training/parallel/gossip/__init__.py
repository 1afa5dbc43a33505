"""Each rank has a copy of the model of its own, and averages it with those of its neighbours."""
