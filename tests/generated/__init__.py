"""Cases that nobody chose, judged by programs that share no code with what they judge.

`clusters.py` draws a small cluster, jobs that hold slots of it, and a queue. `search.py` places
workers on single GPUs by trying every way. `test_plans.py` compares the plan with it.

`make test` draws the same cases each time, and `make soak` draws new ones; `tests/seeds.py` prints
the first seed and the commit. A case that fails is made smaller before it is printed. Then add a
small test of its own next to the code that was wrong.
"""
