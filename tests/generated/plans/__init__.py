"""Drawn clusters and queues.

`clusters.py` draws a small cluster, jobs that hold slots of it, and a queue. `search.py` places
workers on single GPUs by trying every way. `test_plans.py` compares the plan with it.
"""
