"""Modules shared by the other folders: schedule, progress, errors, and the workload."""
