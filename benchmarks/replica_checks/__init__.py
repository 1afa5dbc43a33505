"""The step time of a job that compares its replicas, relative to the same job without
comparisons."""
