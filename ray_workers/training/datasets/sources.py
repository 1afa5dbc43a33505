"""A source, whatever its scheme: which files it has, what they hash to, and where they lie here."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from ray_workers.contracts import DataPolicy
from ray_workers.training.datasets.cache import NodeCache
from ray_workers.training.datasets.credentials import load_credentials
from ray_workers.training.datasets.faults import SourceUnavailableError, broken
from ray_workers.training.datasets.local import LocalOrigin
from ray_workers.training.datasets.origins import Listed, Listing, Origin, TransferError
from ray_workers.training.errors import DataError

TRIES = 4
FIRST_PAUSE_S = 0.5
"""Between two tries; doubled each time, and spread at random."""
FETCHED_AT_ONCE = 8
T = TypeVar("T")


@dataclass(frozen=True)
class SourceFile:
    """One file, as a build reads it."""

    name: str
    """Within the folder, or of the file itself."""
    path: Path
    place: str
    """Its URL, as errors name it."""


@dataclass(frozen=True)
class Content:
    """What a source holds: (name, SHA-256, bytes) of each file."""

    files: tuple[tuple[str, str, int], ...]
    is_folder: bool

    @property
    def sha256(self) -> str:
        """Of the one file, or of the list of a folder's."""
        if not self.is_folder:
            return self.files[0][1]
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()

    @classmethod
    def from_json(cls, data: Any) -> Self:
        files = tuple((name, sha256, size) for name, sha256, size in data["files"])
        return cls(files, data["is_folder"])

    def to_json(self) -> dict[str, Any]:
        return {"files": self.files, "is_folder": self.is_folder, "seen": time.time()}


class Source:
    """Use it under the cache's lock of its URL."""

    def __init__(
        self,
        url: str,
        policy: DataPolicy,
        cache: NodeCache,
        credentials: str | None,
        suffixes: tuple[str, ...] | None,
    ) -> None:
        self._url = url
        self._cache = cache
        self._suffixes = suffixes
        self.place = url.split("?", 1)[0]
        self._origin = _origin(url, policy, credentials, suffixes)
        self._listing: Listing | None = None

    def identify(self, *, size_bytes: int | None, sha256: str | None) -> Content:
        """What the source holds now, hashed once for each version of it. Raises DataError if it
        is not what it should be."""
        listing = self._listing = retried(self._origin.listing, self.place)
        if not listing.files:
            kinds = ", ".join(self._suffixes or ())
            raise broken(self.place, f"is an empty folder: there is no file of {kinds}")
        if listing.is_folder and (size_bytes is not None or sha256 is not None):
            raise broken(
                self.place, "is a folder, and data.size_bytes and data.sha256 are of one file"
            )
        if not listing.is_folder:
            self._check_size(listing.files[0].size_bytes, size_bytes)
        versions = [(file.name, file.size_bytes, file.version) for file in listing.files]
        name = json.dumps([self._url, listing.is_folder, versions])
        content = self._remembered(name, listing)
        if content is None:
            content = self._read_all(listing)
            self._cache.remember(name, content.to_json())
        self._check(content, size_bytes, sha256)
        return content

    def files(self, content: Content) -> tuple[SourceFile, ...]:
        """The files themselves, on this node; `release` them in the end."""
        assert self._listing is not None
        by_name = {file.name: file for file in self._listing.files}
        found = []
        for name, sha256, _ in content.files:
            listed = by_name[name]
            path = listed.path or self._cache.hold("objects", sha256)
            if path is None:
                if self._read(listed)[0] != sha256:
                    place = self._place_of(name)
                    raise SourceUnavailableError(f"{place} changed while it was read")
                path = self._cache.root / "objects" / sha256
            found.append(SourceFile(name, path, self._place_of(name)))
        return tuple(found)

    def release(self, files: tuple[SourceFile, ...]) -> None:
        """The files of `files` may be removed from the cache again."""
        for file in files:
            self._cache.let_go(file.path)

    def is_unchanged(self) -> bool:
        """Whether a file of this node's own is still what it was when it was identified."""
        assert self._listing is not None
        return self._listing.files[0].path is None or self._origin.listing() == self._listing

    def _remembered(self, name: str, listing: Listing) -> Content | None:
        found = self._cache.remembered(name)
        if found is None:
            return None
        if listing.trusted_s is not None and time.time() - found["seen"] > listing.trusted_s:
            return None
        return Content.from_json(found)

    def _read_all(self, listing: Listing) -> Content:
        files = listing.files
        if files[0].path is None:
            total = sum(file.size_bytes or 0 for file in files)
            self._refuse_too_large(total)
            self._cache.sweep(total)
        if len(files) == 1 or files[0].path is not None:
            read = [self._read(file) for file in files]
        else:
            with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
                read = list(pool.map(self._read, files))
        together = zip(files, read, strict=True)
        return Content(tuple((file.name, *one) for file, one in together), listing.is_folder)

    def _read(self, file: Listed) -> tuple[str, int]:
        """(SHA-256, bytes) of the file, which is now in the cache if it came from elsewhere."""
        place = self._place_of(file.name)
        if file.path is not None:
            digest = hashlib.sha256()
            self._origin.fetch(file, digest.update)
            return digest.hexdigest(), file.path.stat().st_size
        return retried(lambda: self._download(file, place), place)

    def _download(self, file: Listed, place: str) -> tuple[str, int]:
        digest = hashlib.sha256()
        size = 0
        with self._cache.scratch() as scratch:
            partial = scratch / "partial"
            with open(partial, "wb") as target:

                def sink(piece: bytes) -> None:
                    nonlocal size
                    size += len(piece)
                    self._refuse_too_large(size)
                    digest.update(piece)
                    target.write(piece)

                self._origin.fetch(file, sink)
            if file.size_bytes is not None and size != file.size_bytes:
                raise TransferError(f"{size:,} bytes came, not {file.size_bytes:,}")
            self._cache.add("objects", digest.hexdigest(), partial)
        return digest.hexdigest(), size

    def _place_of(self, name: str) -> str:
        assert self._listing is not None
        return f"{self.place.rstrip('/')}/{name}" if self._listing.is_folder else self.place

    def _refuse_too_large(self, size_bytes: int) -> None:
        if size_bytes > self._cache.limit_bytes:
            raise broken(
                self.place,
                f"has more than the {self._cache.limit_bytes:,} bytes that a node's cache may "
                "take (DRAY_DATA_CACHE_LIMIT_BYTES)",
            )

    def _check_size(self, found: int | None, wanted: int | None) -> None:
        if found is not None and wanted is not None and found != wanted:
            raise broken(self.place, f"has {found:,} bytes, but data.size_bytes is {wanted:,}")

    def _check(self, content: Content, size_bytes: int | None, sha256: str | None) -> None:
        if content.is_folder:
            return
        _, found, size = content.files[0]
        self._check_size(size, size_bytes)
        if sha256 is not None and found != sha256:
            raise broken(self.place, f"has the SHA-256 {found}, but data.sha256 is {sha256}")
        if size == 0:
            raise broken(self.place, "is an empty file")


def retried(action: Callable[[], T], place: str) -> T:
    """What `action` answers, asked again a few times if the transfer breaks off."""
    for attempt in range(TRIES):
        try:
            return action()
        except TransferError as error:
            fault = str(error)
        if attempt + 1 < TRIES:
            time.sleep(FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5))
    raise SourceUnavailableError(f"{place}: {fault}; tried {TRIES} times") from None


def _origin(
    url: str, policy: DataPolicy, credentials: str | None, suffixes: tuple[str, ...] | None
) -> Origin:
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return LocalOrigin(url, policy, suffixes)
    options = load_credentials(policy.credentials_dir, credentials)
    if scheme in ("http", "https"):
        from ray_workers.training.datasets.http import HttpOrigin

        return HttpOrigin(url, policy, options, suffixes)
    if scheme == "s3":
        from ray_workers.training.datasets.s3 import S3Origin

        return S3Origin(url, policy, options, suffixes)
    raise DataError(f"{url.split('?', 1)[0]}: dray reads nothing by {scheme}://")
