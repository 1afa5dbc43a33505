"""Code that a job document specifies as a folder on this machine: `code: .`.

The server only accepts the id of uploaded code, so the client uploads the folder when the job is
submitted, and replaces the path with the id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dray.code.packing import PackedCode

_PARTS = ("script", "model")
"""Parts of a document that can contain the field `code`."""
_BEGINNINGS = ("./", "../", "/", "~")


def is_folder(code: Any) -> bool:
    """Whether a value of `code` is a path instead of the id of uploaded code. A path begins with
    `.`, `/` or `~`."""
    return isinstance(code, str) and (code in (".", "..") or code.startswith(_BEGINNINGS))


def code_part(document: Mapping[str, Any]) -> str | None:
    """Return the part of the document whose `code` is a path: `script` or `model`; None if there is
    none."""
    for name in _PARTS:
        part = document.get(name)
        if isinstance(part, Mapping) and is_folder(part.get("code")):
            return name
    return None


def named_folder(document: Mapping[str, Any], base: Path) -> Path | None:
    """Return the code folder that the document specifies; None if there is no such folder.

    base: the folder of the document, to which paths are relative.
    """
    part = code_part(document)
    if part is None:
        return None
    return (base / Path(document[part]["code"]).expanduser()).resolve()


def packed_code(document: Mapping[str, Any], base: Path) -> PackedCode | None:
    """Pack the code folder that the document specifies. Returns None if the document specifies no
    code folder. Raises SpecError if the folder can't be packed."""
    folder = named_folder(document, base)
    if folder is None:
        return None
    from dray.code.packing import pack  # most documents don't specify a folder

    return pack(folder)


def with_code(document: Mapping[str, Any], code: str | None) -> dict[str, Any]:
    """Return a copy of the document with the path of the code replaced by `code`."""
    part = code_part(document)
    if part is None:
        return dict(document)
    return {**document, part: {**document[part], "code": code}}


def with_upload(document: Mapping[str, Any], packed: PackedCode) -> dict[str, Any]:
    """Return a copy of the document with the id of the packed code instead of its path, and with
    the commit from which it was packed."""
    return with_commit(with_code(document, packed.id), packed)


def with_commit(document: Mapping[str, Any], packed: PackedCode) -> dict[str, Any]:
    """Return a copy of the document in which `origin.git` is the commit of the packed code."""
    origin = document.get("origin") or {}
    if not isinstance(origin, Mapping):  # the document is refused when it is checked
        return dict(document)
    origin = {**{name: value for name, value in origin.items() if name != "git"}}
    if packed.git is not None:
        origin["git"] = packed.git
    others = {name: value for name, value in document.items() if name != "origin"}
    return {**others, "origin": origin} if origin else others
