"""What several rooms need: wire contracts, heartbeat pages, paths. No Ray and no torch."""
