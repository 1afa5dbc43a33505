"""A simulation: the ranks play the clients, whose data are parts of the job's data set."""
