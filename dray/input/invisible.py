"""Characters that a user can't see in a token, and that are copied along with it from chats and web
pages."""

from __future__ import annotations

import unicodedata

_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters, marks and symbols without a shape."""


def is_invisible(character: str) -> bool:
    """Whether nothing is drawn for the character, or only a space that is not the plain one."""
    if character == " ":
        return False
    is_selector = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    return unicodedata.category(character)[0] in "CZ" or character in _BLANK or is_selector


def invisible_character(text: str) -> str | None:
    """Describe the first invisible character of a text by its code and position; None if the text
    has none. The description does not contain any other part of the text."""
    for position, character in enumerate(text, start=1):
        if is_invisible(character):
            name = unicodedata.name(character, "")
            code = f"U+{ord(character):04X}" + (f" {name}" if name else "")
            return f"an invisible character ({code}) at position {position}"
    return None
