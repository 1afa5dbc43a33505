"""Numbers with units, such as `2h` and `8GiB`. Documents are stored with plain numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_SECONDS_OF: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES_OF: Final = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}

DURATION: Final = rf"^\s*(?:{_NUMBER}\s*(?:w|d|h|min|m|s)\s*)+$"
"""Pattern of a duration, such as `90s`, `2h` or `1h30m`."""
SIZE: Final = rf"^\s*{_NUMBER}\s*[kKmMgGtTpP]?[iI]?[bB]\s*$"
"""Pattern of a size, such as `500MB` (powers of 1000) or `8GiB` (powers of 1024)."""


def seconds(text: str) -> int:
    """Convert `90s`, `45m`, `2h`, `1h30m`, `3d` or `1w` to seconds. Raises ValueError for other
    strings."""
    if not re.fullmatch(DURATION, text):
        raise ValueError(
            "must be a number of seconds, or a duration such as 90s, 45m, 2h, 1h30m or 3d"
        )
    parts = re.findall(rf"({_NUMBER})\s*([a-z]+)", text)
    return _whole(sum(Decimal(number) * _SECONDS_OF[unit] for number, unit in parts), "seconds")


def num_bytes(text: str) -> int:
    """Convert `500MB` or `8GiB` to bytes. Raises ValueError for other strings, including `8G`,
    which some programs read as 8 * 1000**3 and others as 8 * 1024**3."""
    bare = re.fullmatch(rf"\s*({_NUMBER})\s*([kKmMgGtTpP])i?\s*", text)
    if bare:
        number, letter = bare[1], bare[2].upper()
        raise ValueError(
            f"is ambiguous: write {number}{letter}iB (powers of 1024) or {number}{letter}B"
        )
    if not re.fullmatch(SIZE, text):
        raise ValueError("must be a number of bytes, or a size such as 500MB or 8GiB")
    parts = re.fullmatch(rf"\s*({_NUMBER})\s*([a-zA-Z]+)\s*", text)
    if parts is None or parts[2].lower() not in _BYTES_OF:
        raise ValueError("must be a number of bytes, or a size such as 500MB or 8GiB")
    return _whole(Decimal(parts[1]) * _BYTES_OF[parts[2].lower()], "bytes")


def _whole(number: Decimal | int, of: str) -> int:
    if number != int(number):
        raise ValueError(f"is not a whole number of {of}")
    return int(number)


def money(amount: float, currency: str) -> str:
    """Format an amount, such as `1,234.50 EUR`. Amounts below 0.01 have three significant digits:
    `0.00123 EUR`."""
    text = f"{amount:.3g}" if 0 < amount < 0.01 else f"{amount:,.2f}"
    return f"{text.removesuffix('.00')} {currency}"
