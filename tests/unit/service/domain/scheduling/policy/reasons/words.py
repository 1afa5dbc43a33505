"""Quantities and names in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping

Amounts = Mapping[str, float]
UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def quantity(words: str) -> tuple[str, float]:
    """Parse text such as `8 GPU` or `15.5 GiB of memory`, and return the resource and the
    amount."""
    found = re.fullmatch(r"([\d.]+) (?:(\w+) of memory|(\S+))", words)
    assert found, words
    number, unit, name = found.groups()
    assert "e" not in number, words
    return ("memory", float(number) * UNITS[unit]) if unit else (name, float(number))


def is_about(words: str, amount: float) -> bool:
    """Whether a quantity in text equals this amount, up to rounding."""
    value = quantity(words)[1]
    return abs(value - amount) <= 0.006 * max(abs(value), abs(amount)) + 1e-9


def some_jobs(words: str) -> tuple[list[str], int]:
    """Parse text such as `jobs a, b, c and 7 more`, and return the named jobs and the total
    number."""
    found = re.fullmatch(r"(jobs?) (\S+(?:, \S+)*)(?: and (\d+) more)?", words)
    assert found, words
    names = found[2].split(", ")
    number = len(names) + int(found[3] or 0)
    assert (found[1] == "job") == (number == 1), words
    return names, number


def bundle_matches(words: str, bundle: Amounts) -> bool:
    """Whether the text for one worker names all resources that it requests."""
    words, _, labels = words.partition(" on nodes with ")
    words, _, kind = words.partition(" on ")
    asked = dict(bundle)
    for label in filter(None, labels.split(", ")):
        asked.pop(f"label:{label}")
    if kind:
        asked.pop(f"accelerator_type:{kind}")
    for each in re.split(r", | and ", words):
        name, _ = quantity(each)
        if not is_about(each, asked.pop(name)):
            return False
    return not asked
