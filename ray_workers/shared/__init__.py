"""Modules shared by several packages: contracts, frames, heartbeat, paths. None of these modules
imports Ray or torch."""
