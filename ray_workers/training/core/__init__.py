"""Modules that the other folders share: schedule, progress, errors, the workload."""
