"""Jobs through the queue per second, and the time from a submit to its claim."""
