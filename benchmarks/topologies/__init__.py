"""What each way to keep copies in step costs, with one rank slowed tenfold and without."""
