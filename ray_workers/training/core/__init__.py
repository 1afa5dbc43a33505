"""The common parts of the training's rooms: schedule, progress, errors, the workload."""
