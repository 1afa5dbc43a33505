"""The memory that the planner expects for a job, compared with torch's memory tracker."""
