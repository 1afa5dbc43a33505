"""The description of an upload: the paths and the parts of its files.

A part is a piece of a file of up to PART_BYTES, and is identified by its SHA-256 digest. Parts that
have been uploaded before are not sent again. The code's id is derived from the description, so the
same files have the same id.
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
"""Maximum length of a file name on Linux."""


@dataclass(frozen=True)
class FileEntry:
    """One file of an upload."""

    path: str
    """Path relative to the code's root, with `/` as the separator."""
    size_bytes: int
    is_executable: bool
    parts: tuple[str, ...]
    """SHA-256 digest of each part in hexadecimal. An empty file has no parts."""


def num_parts(size_bytes: int) -> int:
    """Return the number of parts of a file of this size."""
    return -(-size_bytes // PART_BYTES)


def part_size(size_bytes: int, index: int) -> int:
    """Return the size in bytes of one part of a file of this size. All parts except the last are
    PART_BYTES long."""
    return min(PART_BYTES, size_bytes - index * PART_BYTES)


def code_id(files: Sequence[FileEntry]) -> str:
    """Return the id of these files. The id does not depend on the order of the files."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        kind = "x" if file.is_executable else "-"
        line = "\0".join([file.path, kind, str(file.size_bytes), *file.parts])
        digest.update(line.encode() + b"\n")
    return f"code-{digest.hexdigest()[:32]}"


def fault_of(path: str) -> str | None:
    """Return the error in a file's path, as a predicate that follows 'the path'; None if the path
    is valid.

    A valid path can't lead out of the code's root.
    """
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "is not UTF-8"
    parts = path.split("/")
    if path.startswith("/"):
        return "is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "has a component that is empty, `.` or `..`"
    if "\\" in path:
        return "has a backslash"
    if (found := unfit(path)) is not None:
        return f"contains {found}"
    if size > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"contains a name longer than {MAX_NAME_BYTES} bytes"
    return None


def collision_in(paths: Iterable[str]) -> tuple[str, str] | None:
    """Return two of these paths that can't both exist in one folder; None if there is no such pair.

    Paths collide if they are equal, if they look the same because they differ only in their Unicode
    normalization, or if a file has the path of a folder.
    """
    # NUL sorts before all characters of a path, so the contents of a folder immediately follow its
    # name.
    forms = sorted((unicodedata.normalize("NFC", path).replace("/", "\0"), path) for path in paths)
    for (form, path), (next_form, other) in itertools.pairwise(forms):
        if next_form == form or next_form.startswith(f"{form}\0"):
            return path, other
    return None
