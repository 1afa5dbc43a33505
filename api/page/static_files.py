"""The files of the page, read once and kept in memory, also compressed.

The address of each file has a hash of all of them in it. Browsers keep such a file for good, and an
upgrade of the server never mixes files of two versions. Modules import each other by relative
paths, so that the hash is written in one place only: `index.html`.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
VERSION_MARK = b"page/VERSION/"
"""How `index.html` writes the address of a file."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page: no inline script or style, and nothing from elsewhere."""
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class StaticFile:
    media_type: str
    body: bytes
    compressed: bytes
    """The body, compressed by gzip."""

    @classmethod
    def of(cls, name: str, body: bytes) -> StaticFile:
        media_type = _MEDIA_TYPES.get(Path(name).suffix, "text/plain; charset=utf-8")
        return cls(media_type, body, gzip.compress(body, mtime=0))


@dataclass(frozen=True)
class StaticFiles:
    version: str
    """A hash of all files."""
    index: StaticFile
    files: Mapping[str, StaticFile]
    """By the path below the folder."""


@cache
def load(folder: Path = FOLDER) -> StaticFiles:
    """The files of a folder. Names that begin with a dot are left out."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    digest = hashlib.sha256()
    for name, body in found.items():
        digest.update(f"{name}\0{len(body)}\0".encode())
        digest.update(body)
    version = digest.hexdigest()[:16]
    index = found.pop("index.html").replace(VERSION_MARK, f"page/{version}/".encode())
    return StaticFiles(
        version,
        StaticFile.of("index.html", index),
        {name: StaticFile.of(name, body) for name, body in found.items()},
    )
