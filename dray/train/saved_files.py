"""Records which files were passed to `save_artifact`, in a file on the node that exists until the
attempt ends.

At the end of an attempt, dray lists the results that are not in any storage. A file that has not
changed since it was saved is not listed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

Version = tuple[int, int, int, int]
"""(device, inode, size in bytes, time of change). This tuple stays the same as long as the
file does not change."""
MAX_BYTES = 4 << 20
"""Maximum number of bytes of records to read."""
_NAME = "saved"


def version_of(found: os.stat_result) -> Version:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def note(version: Version) -> None:
    """Record a file that has been copied to the storage. Does nothing outside of dray."""
    output = os.environ.get("DRAY_OUTPUT_DIR")
    if output is not None:
        line = " ".join(map(str, version)) + "\n"
        with contextlib.suppress(OSError), (Path(output).parent / _NAME).open("a") as notes:
            notes.write(line)


def noted(folder: Path) -> frozenset[Version]:
    """Return the recorded files. folder: the parent of DRAY_OUTPUT_DIR, which scripts can write
    to."""
    try:
        opened = os.open(folder / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return frozenset()
    with open(opened, "rb") as notes:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            return frozenset()
        lines = notes.read(MAX_BYTES).split(b"\n")
    found = set()
    for line in lines:
        with contextlib.suppress(ValueError):
            device, inode, size, changed = map(int, line.split())
            found.add((device, inode, size, changed))
    return frozenset(found)
