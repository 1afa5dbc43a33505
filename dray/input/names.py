"""The characters that a name may not contain, and no output may contain unescaped."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

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
MAX_PATTERN_CHARS: Final = 500
MAX_PATTERN_BYTES: Final = 1 << 20
"""Memory that one compiled pattern may take."""


def unfit(name: str) -> str | None:
    """Description of the first character in the name that may break databases, terminals or pages;
    None if there is no such character."""
    for character in name:
        kind = _REFUSED.get(unicodedata.category(character))
        if kind is not None and character not in _JOINERS:
            return f"the {kind} U+{ord(character):04X}"
    return None


def compile_pattern(pattern: str) -> Any:
    """The pattern, compiled by RE2, whose searches take time in proportion to the line, whatever
    the pattern. ValueError if it is none; ImportError where RE2 is not installed."""
    import re2  # on servers and nodes only

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        said = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"is no regular expression of RE2: {said}") from None
