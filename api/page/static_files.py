"""The files of the page, read once and kept in memory, with a compressed copy.

The address of each file contains a hash of all files, so that browsers can cache a file forever,
and files of two versions are never mixed after an upgrade of the server. Modules import each other
by relative paths, so only `index.html` contains the hash.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "static"
EXAMPLES = Path(__file__).parents[2] / "examples"
VERSION_MARK = b"page/VERSION/"
"""Prefix of each file's address in `index.html`."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: no inline code or styles, and nothing from other origins."""
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class StaticFile:
    media_type: str
    body: bytes
    compressed: bytes
    """The body, compressed with gzip."""

    @classmethod
    def of(cls, name: str, body: bytes) -> StaticFile:
        media_type = _MEDIA_TYPES.get(Path(name).suffix, "text/plain; charset=utf-8")
        return cls(media_type, body, gzip.compress(body, mtime=0))


@dataclass(frozen=True)
class StaticFiles:
    version: str
    """Hash of all files."""
    index: StaticFile
    files: Mapping[str, StaticFile]
    """The other files, keyed by their paths relative to the folder."""


@cache
def load(folder: Path = FOLDER) -> StaticFiles:
    """Read the files of a folder, except files whose name begins with a dot."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    found["examples.json"] = json.dumps(_examples(EXAMPLES)).encode()
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


def _examples(folder: Path) -> dict[str, Any]:
    """Return the job documents below a folder, keyed by name. The page offers these documents as
    templates."""
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    documents = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
    return {name: yaml.safe_load(path.read_text()) for name, path in documents.items()}
