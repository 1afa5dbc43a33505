"""The files that were given to `save_artifact`, noted on the node until the end of the attempt.

The end of an attempt names the results that no storage keeps; a file that is as it was when it was
saved is none of these.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

Version = tuple[int, int, int, int]
"""(device, inode, bytes, time of change): equal as long as a file is not changed."""
MAX_BYTES = 4 << 20
"""The most bytes of notes that are read."""
_NAME = "saved"


def version_of(found: os.stat_result) -> Version:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def note(version: Version) -> None:
    """Note a file that the storage has. Without a folder for it, as outside of dray, do nothing."""
    output = os.environ.get("DRAY_OUTPUT_DIR")
    if output is not None:
        line = " ".join(map(str, version)) + "\n"
        with contextlib.suppress(OSError), (Path(output).parent / _NAME).open("a") as notes:
            notes.write(line)


def noted(folder: Path) -> frozenset[Version]:
    """The files that were noted. folder: that of DRAY_OUTPUT_DIR, which a script may write to."""
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
