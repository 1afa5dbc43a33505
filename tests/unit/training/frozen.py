"""Imported last by the forkserver of the tests, so that its children collect what is their own.

The real one does the same: looking through what they share would copy every page of it.
"""

import gc

gc.collect()
gc.freeze()
