"""Marks log lines that are states of a redrawn row, such as a progress bar.

The mark is an escape sequence at the beginning of the text (OSC, ECMA-48, 8.3.89), which terminals
ignore.
"""

from __future__ import annotations

import re

_MARK = re.compile(r"\x1b\]dray;row=([0-9a-f.]{1,64})\x07")


def row_mark(row: str) -> str:
    """Return the mark for a state of this row; an empty string if `row` is empty."""
    return f"\x1b]dray;row={row}\x07" if row else ""


def without_mark(text: str) -> tuple[str | None, str]:
    """Return the name of the row if the text begins with a mark, and the text without the mark."""
    found = _MARK.match(text)
    return (found[1], text[found.end() :]) if found else (None, text)
