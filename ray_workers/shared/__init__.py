"""Parts that several rooms need: wire contracts, frames, heartbeat, paths. No Ray and no torch."""
