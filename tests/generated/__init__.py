"""Cases that nobody chose, judged by programs that share no code with what they judge.

A folder for each generator. `make test` draws the same few cases each time, and `make soak` draws
new ones; `tests/seeds.py` prints the first seed and the commit. A case that fails is made smaller
before it is printed. Then add a small test of its own next to the code that was wrong.
"""
