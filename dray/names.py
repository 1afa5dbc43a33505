"""The characters that a name may not contain."""

from __future__ import annotations

import unicodedata

_REFUSED = {
    "Cc": "control character",
    "Cf": "invisible character",
    "Cs": "lone surrogate",
    "Zl": "line break",
    "Zp": "line break",
}
"""By category. The invisible ones turn the direction of what is shown around them, or make two
names look the same."""
_JOINERS = "\u200c\u200d"
"""Invisible, but Persian and Hindi are written with them, and emoji made of others."""


def unfit(name: str) -> str | None:
    """The first character that no name needs and that databases, terminals and pages trip over,
    as an error would say it; None of a name that is fit."""
    for character in name:
        kind = _REFUSED.get(unicodedata.category(character))
        if kind is not None and character not in _JOINERS:
            return f"the {kind} U+{ord(character):04X}"
    return None
