"""Makes text from elsewhere storable: no NUL, no half of a character."""

from __future__ import annotations


def clean(text: str) -> str:
    """Text that every database stores: no NUL (PostgreSQL) and no lone surrogates (UTF-8)."""
    return text.replace("\0", "␀").encode("utf-8", "replace").decode()
