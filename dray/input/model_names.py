"""Names of registered models, and references to their versions: `model://NAME@VERSION` or
`model://NAME@ALIAS`."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, NamedTuple

from dray.input.names import unfit

MAX_CHARS: Final = 200
_CHARACTERS: Final = r"[^\s/\\@:?#%]"
NAME: Final = rf"^{_CHARACTERS}{{1,{MAX_CHARS}}}$"
ALIAS: Final = r"^[a-z][a-z0-9_.-]{0,62}$"
"""Aliases begin with a letter, so that they can't be confused with the number of a version."""
MAX_VERSION: Final = 10**9
REFERENCE: Final = (
    rf"^model://{_CHARACTERS}{{1,{MAX_CHARS}}}@([1-9][0-9]{{0,8}}|[a-z][a-z0-9_.-]{{0,62}})$"
)
SCHEME: Final = "model://"


class ModelReference(NamedTuple):
    """A version of a registered model, as a user names it."""

    name: str
    version: int | str
    """The number of the version, or an alias."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}@{self.version}"


def checked_name(name: str) -> str:
    """Return the name in the normal form NFC. Raises ValueError if it can't be the name of a
    registered model."""
    name = unicodedata.normalize("NFC", name)
    if (found := unfit(name)) is not None:
        raise ValueError(f"must not contain {found}")
    if re.fullmatch(NAME, name) is None or name in (".", ".."):
        raise ValueError(
            f"must have 1 to {MAX_CHARS} characters, without spaces and / \\ @ : ? # %"
        )
    return name


def same_name(name: str) -> str:
    """Return the form that is equal for names that differ only in case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def checked_reference(text: str) -> str:
    """Return the reference with its name in normal form. Raises ValueError for any other text."""
    return str(parse(text))


def parse(text: str) -> ModelReference:
    """Parse a reference. Raises ValueError if the text isn't one."""
    name, at, version = text.removeprefix(SCHEME).rpartition("@")
    if not text.startswith(SCHEME) or not at or re.fullmatch(REFERENCE, text) is None:
        raise ValueError(
            "must name a version of a registered model by its number or by an alias, such as "
            "model://digits@3 or model://digits@production"
        )
    return ModelReference(checked_name(name), int(version) if version.isdigit() else version)
