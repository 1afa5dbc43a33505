"""The memory that the planner expects of a job, against torch's memory tracker."""
