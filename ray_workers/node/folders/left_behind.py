"""Finds results that a script left in its working directory. Such files are not copied to the
storage."""

from __future__ import annotations

import filecmp
import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from dray.train.saved_files import Version, version_of

MAX_FILES = 20_000
"""Maximum number of files to examine."""
NAMED = 5
"""Maximum number of directory entries that the message lists, largest first."""
_UNITS = ("B", "KB", "MB", "GB", "TB")


def left_behind(
    directory: Path, since_ns: int, code: Path | None, saved: Collection[Version] = ()
) -> str:
    """Return a message about files that were written to a script's working directory since a given
    time; empty if there are none.

    code: the folder with the job's code, whose files are also in the directory. saved: files that
    have been saved as artifacts. Links, hidden files and Python's caches are ignored.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for number, path in enumerate(_files(directory)):
        if number == MAX_FILES:
            break
        copied = None if code is None else code / path
        if (size := _size_of_result(directory / path, since_ns, copied, saved)) is not None:
            top, _, below = path.partition("/")
            sizes[f"{top}/" if below else top].append(size)
    if not sizes:
        return ""
    ordered = sorted(sizes, key=lambda name: (-sum(sizes[name]), name))
    names = [f"{name[:100]!r} ({_text(sum(sizes[name]))})" for name in ordered[:NAMED]]
    more = " ..." if len(ordered) > NAMED else ""
    number = sum(map(len, sizes.values()))
    files = "1 file was" if number == 1 else f"{number} files were"
    return (
        f"{files} left in the working directory and not kept as artifacts: {', '.join(names)}"
        f"{more}; to keep results, write them to DRAY_OUTPUT_DIR or call train.save_artifact"
    )


def _files(directory: Path) -> Iterator[str]:
    """Yield paths relative to the directory."""
    for at, folders, names in os.walk(directory):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        base = Path(at).relative_to(directory)
        yield from ((base / name).as_posix() for name in sorted(names) if not name.startswith("."))


def _size_of_result(
    path: Path, since_ns: int, copied: Path | None, saved: Collection[Version]
) -> int | None:
    """Return the size of the file in bytes, or None if it is not a result. copied: the file of the
    same name in the job's code."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_mtime_ns < since_ns:
            return None
        if version_of(found) in saved:
            return None
        if copied is not None and copied.is_file():
            return None if filecmp.cmp(copied, path, shallow=False) else found.st_size
        return found.st_size
    except OSError:  # removed in the meantime
        return None


def _text(size_bytes: float) -> str:
    unit = 0
    while size_bytes >= 999.5 and unit + 1 < len(_UNITS):
        size_bytes, unit = size_bytes / 1000, unit + 1
    return f"{size_bytes:.3g} {_UNITS[unit]}"
