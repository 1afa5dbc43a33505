"""Modules shared by several packages: contracts, frames, heartbeat, paths. None of them imports Ray
or torch."""
