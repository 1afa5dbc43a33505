"""Whether a job can start with the state or the weights of another job."""
