"""The results that a script left in its working directory, which no storage keeps."""

from __future__ import annotations

import filecmp
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 20_000
"""Files that are looked at."""
NAMED = 5
"""Entries of the directory that the sentence names, the largest first."""
_UNITS = ("B", "KB", "MB", "GB", "TB")


def left_behind(directory: Path, since_ns: int, code: Path | None) -> str:
    """A sentence on the files that were written into a script's working directory since a time;
    empty if there are none.

    code: the folder with the job's code, whose files are in the directory as well. Links, hidden
    files and what Python caches do not count.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for number, path in enumerate(_files(directory)):
        if number == MAX_FILES:
            break
        if (size := _size_of_result(directory, path, since_ns, code)) is not None:
            top, _, below = path.partition("/")
            sizes[f"{top}/" if below else top].append(size)
    if not sizes:
        return ""
    ordered = sorted(sizes, key=lambda name: (-sum(sizes[name]), name))
    names = [f"{name[:100]!a} ({_text(sum(sizes[name]))})" for name in ordered[:NAMED]]
    more = " ..." if len(ordered) > NAMED else ""
    number = sum(map(len, sizes.values()))
    files = "1 file was" if number == 1 else f"{number} files were"
    return (
        f"{files} left in the working directory and not kept as artifacts: {', '.join(names)}"
        f"{more}; write results to the folder DRAY_OUTPUT_DIR"
    )


def _files(directory: Path) -> Iterator[str]:
    """Paths relative to the directory."""
    for at, folders, names in os.walk(directory):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        base = Path(at).relative_to(directory)
        yield from ((base / name).as_posix() for name in sorted(names) if not name.startswith("."))


def _size_of_result(directory: Path, path: str, since_ns: int, code: Path | None) -> int | None:
    """The file's bytes; None if it is no result."""
    place = directory / path
    try:
        found = place.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_mtime_ns < since_ns:
            return None
        if code is not None and (code / path).is_file():
            return None if filecmp.cmp(code / path, place, shallow=False) else found.st_size
        return found.st_size
    except OSError:  # removed meanwhile
        return None


def _text(size_bytes: float) -> str:
    unit = 0
    while size_bytes >= 999.5 and unit + 1 < len(_UNITS):
        size_bytes, unit = size_bytes / 1000, unit + 1
    return f"{size_bytes:.3g} {_UNITS[unit]}"
