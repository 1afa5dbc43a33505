"""The characters that a name may not contain, and no output may contain unescaped."""

from __future__ import annotations

import unicodedata

_REFUSED = {
    "Cc": "control character",
    "Cf": "invisible character",
    "Cs": "lone surrogate",
    "Zl": "line break",
    "Zp": "line break",
}
"""Unfit characters by Unicode category. Invisible ones change the direction of the text around
them, or make two names look the same."""
_JOINERS = "\u200c\u200d"
"""Invisible characters that Persian, Hindi and composed emoji need."""

DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Characters that change the direction of the text around them, for a class of a regular
expression."""


def unfit(name: str) -> str | None:
    """Description of the first character in the name that may break databases, terminals or pages;
    None if there is no such character."""
    for character in name:
        kind = _REFUSED.get(unicodedata.category(character))
        if kind is not None and character not in _JOINERS:
            return f"the {kind} U+{ord(character):04X}"
    return None
