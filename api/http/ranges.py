"""The `Range` header (RFC 9110, section 14): one range of bytes of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    start: int
    end: int
    """One past the last byte."""

    @property
    def length(self) -> int:
        return self.end - self.start


class Unsatisfied(Exception):
    """The range is well formed, but the file has no byte in it."""


def parse_range(header: str | None, size: int) -> Range | None:
    """The range that was asked for; None means the whole file.

    As the RFC allows, a header that is no range of bytes, or that asks for several, is ignored.
    Raises Unsatisfied.
    """
    match = re.fullmatch(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", header or "")
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:  # a suffix: the last bytes of the file
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        raise Unsatisfied
    return Range(start, end)
