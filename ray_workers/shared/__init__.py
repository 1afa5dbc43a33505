"""Modules shared by several packages: contracts, frames, heartbeat, paths. None imports Ray or
torch."""
