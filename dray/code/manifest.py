"""The description of an upload: the path and the parts of each file.

A part is at most PART_BYTES of one file and is named by its SHA-256, so that a file, or the part of
a large one, that was uploaded before is not sent again. The code's id follows from the description:
the same files have the same id.
"""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dray.input.names import unfit

PART_BYTES = 4 << 20
MAX_FILES = 20_000
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
"""The longest name of a file on Linux."""


@dataclass(frozen=True)
class FileEntry:
    """One file of an upload."""

    path: str
    """Relative to the code's root, with `/` between its folders."""
    size_bytes: int
    is_executable: bool
    parts: tuple[str, ...]
    """The SHA-256 of each PART_BYTES of it, in hexadecimal; none of an empty file."""


def num_parts(size_bytes: int) -> int:
    """Return the number of parts of a file of this size."""
    return -(-size_bytes // PART_BYTES)


def part_size(size_bytes: int, index: int) -> int:
    """Bytes of one part of a file of this size: all but the last are PART_BYTES long."""
    return min(PART_BYTES, size_bytes - index * PART_BYTES)


def code_id(files: Sequence[FileEntry]) -> str:
    """The id of these files, in whatever order they are given."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        kind = "x" if file.is_executable else "-"
        line = "\0".join([file.path, kind, str(file.size_bytes), *file.parts])
        digest.update(line.encode() + b"\n")
    return f"code-{digest.hexdigest()[:32]}"


def fault_of(path: str) -> str | None:
    """The fault of a file's path, to follow 'the path ...'; None if there is none.

    One fault is a path that leads out of the code's root.
    """
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    parts = path.split("/")
    if path.startswith("/"):
        return "is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "has an empty part, `.` or `..`"
    if "\\" in path:
        return "has a backslash"
    if (found := unfit(path)) is not None:
        return f"contains {found}"
    if size > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"has a name of more than {MAX_NAME_BYTES} bytes"
    return None


def collision_in(paths: Iterable[str]) -> tuple[str, str] | None:
    """Return two of these paths that can't both be files of one folder; None if all can.

    Paths collide if they are equal, if they differ only in their Unicode form, so that a person
    can't distinguish them, or if a file has the path of a folder.
    """
    # NUL sorts before all that a path may have: what is in a folder comes right after its name.
    forms = sorted((unicodedata.normalize("NFC", path).replace("/", "\0"), path) for path in paths)
    for (form, path), (next_form, other) in itertools.pairwise(forms):
        if next_form == form or next_form.startswith(f"{form}\0"):
            return path, other
    return None
