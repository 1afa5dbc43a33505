"""Serves the manual, if `make docs` has built it. Each file is read when it is requested."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import dray
from api.page.static_files import StaticFile

FOLDER = Path(dray.__file__).parent / "_manual"
"""`make docs` writes into this folder, so that a wheel also contains the manual."""
NOT_BUILT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>dray: manual</title></head>
<body>
<h1>The manual is not built</h1>
<p>Run <code>make docs</code> in the checkout of this server, and load this page again. The sources
of the manual are in the folder <code>docs</code>.</p>
</body>
</html>
"""


def find(path: str, folder: Path = FOLDER) -> StaticFile | None:
    """Return the file at `path` in the folder, or None if it does not exist. If `path` is a folder,
    return its `index.html`."""
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        return None
    if file.is_dir():
        file /= "index.html"
    return _read(file, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=64)
def _read(file: Path, _changed_ns: int) -> StaticFile:
    return StaticFile.of(file.name, file.read_bytes())
