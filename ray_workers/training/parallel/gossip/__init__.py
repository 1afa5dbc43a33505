"""Gossip: each rank has its own copy of the model, which it averages with its neighbours'
copies."""
