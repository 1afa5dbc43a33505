"""A folder of this machine that a job document names as its code: `code: .`.

The server knows uploaded code by its id alone, so the client uploads the folder at the submit and
replaces its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dray.code.packing import PackedCode

_PARTS = ("script", "model")
"""Parts of a document that may have `code`."""
_BEGINNINGS = ("./", "../", "/", "~")


def is_folder(code: Any) -> bool:
    """Whether a value of `code` is a path and not the id of uploaded code. A path begins with
    `.`, `/` or `~`."""
    return isinstance(code, str) and (code in (".", "..") or code.startswith(_BEGINNINGS))


def code_part(document: Mapping[str, Any]) -> str | None:
    """The part of the document whose `code` is a path: `script` or `model`."""
    for name in _PARTS:
        part = document.get(name)
        if isinstance(part, Mapping) and is_folder(part.get("code")):
            return name
    return None


def named_folder(document: Mapping[str, Any], base: Path) -> Path | None:
    """The folder that the document names as its code; None if it names none.

    base: the folder that a relative path starts from, which is the document's own.
    """
    part = code_part(document)
    if part is None:
        return None
    return (base / Path(document[part]["code"]).expanduser()).resolve()


def packed_code(document: Mapping[str, Any], base: Path) -> PackedCode | None:
    """Pack the folder that the document names; None if it names none. Raises SpecError if the
    folder can't be packed."""
    folder = named_folder(document, base)
    if folder is None:
        return None
    from dray.code.packing import pack  # most documents name no folder

    return pack(folder)


def with_code(document: Mapping[str, Any], code: str | None) -> dict[str, Any]:
    """Return a copy of the document with this id, or none, in the place of the path."""
    part = code_part(document)
    if part is None:
        return dict(document)
    return {**document, part: {**document[part], "code": code}}
