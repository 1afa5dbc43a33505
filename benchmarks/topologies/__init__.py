"""The price of each way to keep copies in step, with one rank slowed tenfold and without."""
