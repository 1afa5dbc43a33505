"""Characters that names must not contain and that output must escape, and suggestions of similar
names."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence

_REFUSED = {
    "Cc": "control character",
    "Cf": "invisible character",
    "Cs": "lone surrogate",
    "Zl": "line break",
    "Zp": "line break",
}
"""Unicode categories of forbidden characters. Invisible characters can change the direction of the
surrounding text, or make two names look the same."""
_JOINERS = "\u200c\u200d"
"""Invisible characters that are needed for Persian, Hindi and composed emoji."""

DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Characters that change the direction of the surrounding text, for use in the character class of a
regular expression."""


def unfit(name: str) -> str | None:
    """Describe the first character in the name that could break databases, terminals or web pages.
    Return None if the name has no such character."""
    for character in name:
        kind = _REFUSED.get(unicodedata.category(character))
        if kind is not None and character not in _JOINERS:
            return f"the {kind} U+{ord(character):04X}"
    return None


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """Suggest the candidate that is most similar to the name. Return None if no candidate is
    similar."""
    # A long name is unlikely to match, and comparing it would be slow.
    close = difflib.get_close_matches(name, candidates, n=1) if len(name) <= 100 else []
    return f"did you mean {close[0]!r}?" if close else None
