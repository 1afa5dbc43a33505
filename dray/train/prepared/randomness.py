"""Random numbers by position: each batch starts every generator from a seed of its own.

The seed is a function of the job's seed, the batch and the rank. So a process that takes a dead
one's place draws the same numbers, and no generator's state has to be kept or handed over.
"""

from __future__ import annotations

import random
import sys

import torch

from dray.train.seeding import derive_seed as derive_seed


def seed_generators(seed: int) -> None:
    """Seed Python's, torch's and, where the script has imported it, NumPy's global generators."""
    random.seed(seed)
    # Not `torch.manual_seed`: as long as CUDA is not initialised, each call of it is queued for the
    # time when that happens, with its stack.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
