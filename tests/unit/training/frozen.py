"""Imported last by the tests' forkserver, so that its children import little, and garbage-collect
only their own objects.

The real forkserver does the same: torch imports some modules late, a second of CPU time in each
rank, and scanning the shared objects would copy all of their pages.
"""

import gc

import pytest  # noqa: F401  # the modules of tests, from which ranks take their functions, import it

from ray_workers.training.preload import preload

preload()
gc.collect()
gc.freeze()
