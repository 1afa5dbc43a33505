"""The cost of each way to synchronize copies, with and without one rank slowed down tenfold."""
