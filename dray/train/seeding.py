"""Seeds the generators that a script draws from: Python's, NumPy's and torch's.

In a prepared script, random numbers depend only on the position: for each batch, every generator is
seeded from the job's seed, the batch and the rank. A process that replaces a lost process draws the
same numbers, and no generator's state has to be saved or handed over.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from typing import Any


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that is derived from `parts`, independent of Python's hash
    randomisation."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_from(*parts: int | str) -> None:
    """Seed the global generators on every device. The seed depends only on the parts."""
    seed = derive_seed(*parts)
    random.seed(seed)
    # Import NumPy and torch now if they are installed: NumPy would seed itself if it were imported
    # later.
    if (numpy := _installed("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := _installed("torch")) is not None:
        torch.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, torch and, if the script has imported it, NumPy. torch
    must have been imported."""
    random.seed(seed)
    torch: Any = sys.modules["torch"]
    # Don't use `torch.manual_seed`, which queues each call, with a stack trace, until CUDA is
    # initialised.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
