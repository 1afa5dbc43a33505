"""Modules for several packages: contracts, frames, heartbeat, paths. None imports Ray or torch."""
