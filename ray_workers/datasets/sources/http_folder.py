"""Folders with `http://` and `https://` whose files have known names, such as base models.

Web servers can't list folders. Each file is therefore requested by its name, and a file that does
not exist is not part of the folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from urllib.parse import quote, urlsplit

from dray.spec.program import base_files
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import Listed, Listing, Sink
from ray_workers.datasets.sources.credentials import Options
from ray_workers.datasets.sources.http import (
    UNVERSIONED_TRUSTED_S,
    HttpOrigin,
    NoSuchFileError,
)
from ray_workers.shared.node_needs import DataPolicy

MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 1000
AT_ONCE = 8
"""Number of concurrent requests."""


class HttpFolderOrigin:
    """The files of a folder on a web server, by their names, and the files that the index of the
    weights names."""

    def __init__(
        self, url: str, policy: DataPolicy, options: Options, names: tuple[str, ...]
    ) -> None:
        self._url, self._policy, self._options, self._names = url, policy, options, names
        self._location = url.split("?", 1)[0].rstrip("/")

    def listing(self) -> Listing:
        found = self._existing(self._names)
        listed = {file.name for file in found}
        if base_files.INDEX in listed and base_files.SINGLE not in listed:
            found += self._existing(self._named_in_index(found))
        versioned = all(file.version for file in found)
        files = tuple(sorted(found, key=lambda file: file.name))
        return Listing(files, True, None if versioned else UNVERSIONED_TRUSTED_S)

    def fetch(self, file: Listed, sink: Sink) -> None:
        self._file(file.name).fetch(file, sink)

    def _existing(self, names: Sequence[str]) -> list[Listed]:
        """Return the files with these names that exist."""
        found: list[Listed] = []
        for start in range(0, len(names), AT_ONCE):
            part = asyncio.run(self._looked_up(names[start : start + AT_ONCE]))
            found += [file for file in part if file is not None]
        return found

    async def _looked_up(self, names: Sequence[str]) -> list[Listed | None]:
        return await asyncio.gather(*map(self._look, names))

    async def _look(self, name: str) -> Listed | None:
        try:
            return await self._file(name).look()
        except NoSuchFileError:
            return None

    def _named_in_index(self, found: list[Listed]) -> list[str]:
        """Return the names of the files of weights; an empty list if the index is damaged, which
        is reported when the index is used."""
        (index,) = (file for file in found if file.name == base_files.INDEX)
        pieces: list[bytes] = []

        def keep(piece: bytes) -> None:
            pieces.append(piece)
            if sum(map(len, pieces)) > MAX_INDEX_BYTES:
                raise broken(
                    f"{self._location}/{index.name}", f"has more than {MAX_INDEX_BYTES:,} bytes"
                )

        self.fetch(index, keep)
        try:
            values = set(json.loads(b"".join(pieces))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        names = sorted(name for name in values if isinstance(name, str) and _is_within(name))
        if len(names) > MAX_FILES:
            raise broken(f"{self._location}/{index.name}", f"names more than {MAX_FILES:,} files")
        return names

    def _file(self, name: str) -> HttpOrigin:
        parts = urlsplit(self._url)
        path = f"{parts.path.rstrip('/')}/{quote(name)}"
        url = parts._replace(path=path).geturl()
        return HttpOrigin(url, self._policy, self._options, name)


def _is_within(name: str) -> bool:
    """Whether the name in an index is the path of a file with weights below the folder."""
    path = PurePosixPath(name)
    return name.endswith(".safetensors") and not path.is_absolute() and ".." not in path.parts
