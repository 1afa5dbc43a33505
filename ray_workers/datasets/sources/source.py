"""Identifies the files of a source with any scheme by their hashes, and fetches them to this
node."""

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

from dray.spec.program import base_files
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import Listed, Listing, Origin, TransferError
from ray_workers.datasets.sources.credentials import load_credentials
from ray_workers.datasets.sources.local import LocalOrigin
from ray_workers.datasets.sources.node_cache import NodeCache
from ray_workers.datasets.sources.results import ResultOrigin
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError, SourceUnavailableError

TRIES = 4
FIRST_PAUSE_S = 0.5
"""Pause in seconds after the first failed attempt. The pause doubles after each attempt, with
random variation."""
FETCHED_AT_ONCE = 8
T = TypeVar("T")


@dataclass(frozen=True)
class SourceFile:
    """A file that a build reads."""

    name: str
    """Path within the folder, or the name of the single file."""
    path: Path
    location: str
    """The file's URL, for errors."""


Hashed = tuple[str, str, int]
"""(name, SHA-256, bytes) of a file."""


@dataclass(frozen=True)
class Content:
    """The files of a source, with hashes."""

    files: tuple[Hashed, ...]
    is_folder: bool

    @property
    def sha256(self) -> str:
        """Hash of the single file, or of the list of a folder's files and their hashes."""
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
    """A source. Must be used while holding the cache's lock for the source's URL."""

    def __init__(
        self,
        url: str,
        policy: DataPolicy,
        cache: NodeCache,
        credentials: str | None,
        suffixes: tuple[str, ...] | None,
        names: tuple[str, ...] = (),
    ) -> None:
        """suffixes: if the source is a folder, the suffixes of the files to use; None requires a
        single file. names: if the source is a folder on a web server, the files to look for."""
        self._url = url
        self._cache = cache
        self._suffixes = suffixes
        self.location = location_of(url)
        self._origin = _origin(url, policy, credentials, suffixes, names)
        self._listing: Listing | None = None
        self._kept: Path | None = None

    def identify(self, *, size_bytes: int | None, sha256: str | None) -> Content:
        """Return the current content of the source. The content is hashed only once per version.
        Raises DataError if the content does not match the given size or hash."""
        listing = self._listing = retried(self._origin.listing, self.location)
        if not listing.files:
            kinds = ", ".join(self._suffixes or ())
            raise broken(self.location, f"is a folder without {kinds} files")
        if listing.is_folder and (size_bytes is not None or sha256 is not None):
            raise broken(
                self.location,
                "is a folder, but data.size_bytes and data.sha256 only apply to a single file",
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

    def names(self) -> list[str]:
        """Return the names of the source's files, without reading them."""
        return [file.name for file in retried(self._origin.listing, self.location).files]

    def files(self, content: Content) -> tuple[SourceFile, ...]:
        """Return the files on this node. Call `release` afterwards."""
        assert self._listing is not None
        listed = self._listing.files
        if listed[0].path is None:
            self._kept = self._cache.hold("objects", content.sha256)
            if self._kept is None and self._fetch(self._listing) != content:
                raise SourceUnavailableError(f"{self.location} changed while it was being read")
        found = []
        for number, (file, (name, _, _)) in enumerate(zip(listed, content.files, strict=True)):
            path = file.path or self._cached_path(number, content)
            found.append(SourceFile(name, path, self._location_of(name)))
        return tuple(found)

    def release(self) -> None:
        """Allow the cache to remove the downloaded files."""
        if self._kept is not None:
            self._cache.release(self._kept)
            self._kept = None

    def is_unchanged(self) -> bool:
        """Whether local files are unchanged since they were identified."""
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
        if listing.files[0].path is None:
            return self._fetch(listing)
        return Content(tuple(map(self._hash, listing.files)), listing.is_folder)

    def _hash(self, file: Listed) -> Hashed:
        """Hash a local file without copying it."""
        digest = HashingSink()
        self._origin.fetch(file, digest)
        return (file.name, digest.sha256, digest.size_bytes)

    def _fetch(self, listing: Listing) -> Content:
        """Download all files to the cache as a single entry, and hold the entry."""
        total = sum(file.size_bytes or 0 for file in listing.files)
        self._refuse_too_large(total)
        self._cache.sweep(total)
        with self._cache.scratch() as scratch:
            folder = scratch / "fetched"
            folder.mkdir()
            targets = [folder / _numbered(number) for number in range(len(listing.files))]
            pool = ThreadPoolExecutor(FETCHED_AT_ONCE)
            try:
                content = Content(
                    tuple(pool.map(self._download, listing.files, targets)), listing.is_folder
                )
            finally:
                pool.shutdown(cancel_futures=True)
            made = folder if listing.is_folder else targets[0]
            self._kept = self._cache.add("objects", content.sha256, made)
        return content

    def _download(self, file: Listed, target: Path) -> Hashed:
        def transfer() -> Hashed:
            with open(target, "wb") as opened:
                sink = HashingSink(opened.write, self._refuse_too_large)
                self._origin.fetch(file, sink)
            if file.size_bytes is not None and sink.size_bytes != file.size_bytes:
                fault = f"received {sink.size_bytes:,} bytes instead of {file.size_bytes:,}"
                raise TransferError(fault)
            return (file.name, sink.sha256, sink.size_bytes)

        return retried(transfer, self._location_of(file.name))

    def _cached_path(self, number: int, content: Content) -> Path:
        assert self._kept is not None
        return self._kept / _numbered(number) if content.is_folder else self._kept

    def _location_of(self, name: str) -> str:
        assert self._listing is not None
        return f"{self.location.rstrip('/')}/{name}" if self._listing.is_folder else self.location

    def _refuse_too_large(self, size_bytes: int) -> None:
        if size_bytes > self._cache.limit_bytes:
            raise broken(
                self.location,
                f"has more than {self._cache.limit_bytes:,} bytes, the limit of a node's cache "
                "(DRAY_DATA_CACHE_LIMIT_BYTES)",
            )

    def _check_size(self, found: int | None, wanted: int | None) -> None:
        if found is not None and wanted is not None and found != wanted:
            raise broken(self.location, f"has {found:,} bytes, but data.size_bytes is {wanted:,}")

    def _check(self, content: Content, size_bytes: int | None, sha256: str | None) -> None:
        if content.is_folder:
            return
        _, found, size = content.files[0]
        self._check_size(size, size_bytes)
        if sha256 is not None and found != sha256:
            raise broken(self.location, f"has the SHA-256 {found}, but data.sha256 is {sha256}")
        if size == 0:
            raise broken(self.location, "is an empty file")


class HashingSink:
    """Receives the pieces of a file, hashes them, and forwards them."""

    def __init__(
        self,
        write: Callable[[bytes], object] | None = None,
        check: Callable[[int], None] | None = None,
    ) -> None:
        """Create a sink. write: called with each piece. check: called with the number of bytes so
        far; raises an error if the file is too large."""
        self._write, self._check = write, check
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def __call__(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        if self._check is not None:
            self._check(self.size_bytes)
        self._digest.update(piece)
        if self._write is not None:
            self._write(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def location_of(url: str) -> str:
    """Return the source for error messages, without its query, which might contain secrets."""
    return url.split("?", 1)[0]


def _numbered(number: int) -> str:
    """Return the name under which a downloaded file is stored in its folder. The source can't
    choose this name."""
    return f"{number:08}"


def retried(action: Callable[[], T], location: str) -> T:
    """Return the result of `action`, which is retried a few times if the transfer is
    interrupted."""
    for attempt in range(TRIES):
        try:
            return action()
        except TransferError as error:
            fault = str(error)
        if attempt + 1 < TRIES:
            time.sleep(FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5))
    raise SourceUnavailableError(f"{location}: {fault}; tried {TRIES} times") from None


def _origin(
    url: str,
    policy: DataPolicy,
    credentials: str | None,
    suffixes: tuple[str, ...] | None,
    names: tuple[str, ...],
) -> Origin:
    url = base_files.web_address(url)
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return LocalOrigin(url, policy, suffixes)
    if scheme == "job":
        return ResultOrigin(url, policy, suffixes)
    if scheme == "upload":
        from ray_workers.datasets.sources.uploads import UploadOrigin

        return UploadOrigin(url, policy)
    options = load_credentials(policy.credentials_dir, credentials)
    if scheme in ("http", "https") and names:
        from ray_workers.datasets.sources.http_folder import HttpFolderOrigin

        return HttpFolderOrigin(url, policy, options, names)
    if scheme in ("http", "https"):
        from ray_workers.datasets.sources.http import HttpOrigin

        return HttpOrigin(url, policy, options)
    if scheme == "s3":
        from ray_workers.datasets.sources.s3 import S3Origin

        return S3Origin(url, policy, options, suffixes)
    raise DataError(f"{location_of(url)}: {scheme}:// is not supported")
