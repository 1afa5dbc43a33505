"""Seeds of the generators that a script draws from: Python's, NumPy's and torch's."""

from __future__ import annotations

import hashlib
import importlib
import random
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


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
