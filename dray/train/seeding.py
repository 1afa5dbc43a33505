"""Seeds of the generators that a script draws from: Python's, NumPy's and torch's.

A prepared script draws random numbers by position: each batch starts every generator from a seed of
its own, which is a function of the job's seed, the batch and the rank. So a process that takes a
dead one's place draws the same numbers, and no generator's state has to be kept or handed over.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from typing import Any


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from the parts, independent of Python's hash randomisation."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_from(*parts: int | str) -> None:
    """Seed the global generators, on every device, by a function of the parts alone."""
    seed = derive_seed(*parts)
    random.seed(seed)
    # Imported here if they are installed: NumPy seeds itself when it is imported later.
    if (numpy := _installed("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := _installed("torch")) is not None:
        torch.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed Python's, torch's and, where the script has imported it, NumPy's global generators. For
    a process that has imported torch."""
    random.seed(seed)
    torch: Any = sys.modules["torch"]
    # Not `torch.manual_seed`: as long as CUDA is not initialised, each call of it is queued for the
    # time when that happens, with its stack.
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
