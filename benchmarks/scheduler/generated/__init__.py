"""Simulates generated jobs on clusters of 8 to 2,048 GPUs, under dray's policy and under baselines.
No policy was tuned to these workloads."""
