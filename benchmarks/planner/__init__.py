"""What the planner says a job takes, beside what torch's memory tracker finds."""
