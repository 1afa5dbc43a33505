"""Generated clusters and queues.

`clusters.py` generates a small cluster, jobs that hold slots in it, and a queue. `search.py` places
workers on single GPUs by exhaustive search. `test_plans.py` compares the plan with the search.
"""
