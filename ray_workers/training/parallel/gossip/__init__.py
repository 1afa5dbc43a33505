"""Gossip: each rank has its own copy of the model, and averages it with its neighbours' copies."""
