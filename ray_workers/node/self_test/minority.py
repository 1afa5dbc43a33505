"""Compares results that should be equal on all devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def minority(hashes: Mapping[T, str]) -> list[T]:
    """Return the devices whose hash differs from the hash that more than half of the devices have.
    Return all devices if there is no such majority and not all hashes are equal."""
    if len(set(hashes.values())) <= 1:
        return []
    usual, number = Counter(hashes.values()).most_common(1)[0]
    if 2 * number <= len(hashes):
        return list(hashes)
    return [device for device, hashed in hashes.items() if hashed != usual]
