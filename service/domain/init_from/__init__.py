"""Whether a job may begin with the state or the weights of another job."""
