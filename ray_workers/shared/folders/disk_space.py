"""A check that files can be written to a folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

FULL_BELOW_BYTES = 16 << 20
PROBE_BYTES = 4096


def why_full(folder: Path) -> str | None:
    """Return why no file can be written to a folder; None if it is possible. Writes an unnamed
    file."""
    try:
        free = shutil.disk_usage(folder).free
        if free < FULL_BELOW_BYTES:
            return f"the disk of {folder} is full: {free >> 20} MiB free"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        return f"no file can be written to {folder}: {error.strerror or error}"
    return None
