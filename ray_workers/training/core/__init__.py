"""What the other rooms of the training share: schedule, progress, errors, the workload."""
