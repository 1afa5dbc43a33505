"""Imported last by the tests' forkserver, so that its children garbage-collect only their own
objects.

The real forkserver does the same, because scanning the shared objects would copy all of their
pages.
"""

import gc

gc.collect()
gc.freeze()
