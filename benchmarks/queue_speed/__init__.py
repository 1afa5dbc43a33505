"""Jobs per second through the queue, and the time from submission until a job is claimed."""
