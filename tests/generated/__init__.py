"""Generated cases, judged by programs that share no code with the code under test.

There is a folder for each generator. `make test` generates the same few cases each time, and `make
soak` generates new ones; `tests/seeds.py` prints the first seed and the commit. A failing case is
reduced before it is printed. Then add a small test for it next to the code that was wrong.
"""
