"""Files that must be in the storage when a transaction commits. The files are written before the
commit.

A slow storage must not block SQLite's only writer. Therefore a transaction that needs files runs
twice. The first run determines which files are needed, and is rolled back. Then the files are
written, and the second run stores the rows that name them. If there is no second run, for example
because the service was killed, the files remain without rows. Such files are replaced when the
transaction runs again, and deleted with the folder of their job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from service.domain.errors import StorageUnavailable
from service.storage.storage import Storage, in_storage_thread

T = TypeVar("T")

LIMIT_S = 20.0
"""If writing the files of a transaction takes more than this many seconds, the storage counts as
unavailable."""


MAX_RUNS = 10
"""Maximum number of runs of a transaction. A transaction usually needs two runs, or three after a
concurrent change."""


class Files(Protocol):
    """The storage, or the files staged for the storage."""

    def key_of(self, url: str, /) -> str: ...

    def write_bytes(self, key: str, data: bytes, /) -> None: ...


class FilesMissing(Exception):
    """A transaction was rolled back because the files that it needs are not written yet."""


class StagedFiles:
    """The files that one transaction needs."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._missing: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._refused: dict[str, StorageUnavailable] = {}

    def key_of(self, url: str) -> str:
        return self._storage.key_of(url)

    def write_bytes(self, key: str, data: bytes) -> None:
        """Require a file. If the storage has refused this file, raise the storage's error."""
        if key in self._refused:
            raise self._refused[key]
        if self._written.get(key) != data:
            self._missing[key] = data

    def check(self) -> None:
        """End a run of the transaction. Raises FilesMissing if the run required files that have not
        been written yet."""
        if self._missing:
            raise FilesMissing(f"{len(self._missing)} files have not been written yet")

    async def write(self) -> None:
        """Write the missing files. Stop at the first file that the storage refuses."""
        missing, self._missing = self._missing, {}
        for key, data in missing.items():
            try:
                async with asyncio.timeout(LIMIT_S):
                    await in_storage_thread(self._storage.write_bytes, key, data)
            except StorageUnavailable as error:
                self._refused[key] = error
                return
            except TimeoutError:
                message = f"{key} was not written to the storage within {LIMIT_S:g} s"
                self._refused[key] = StorageUnavailable(message)
                return
            self._written[key] = data


async def with_files(storage: Storage, write: Callable[[StagedFiles], Awaitable[T]]) -> T:
    """Return the result of `write`, which runs a transaction that ends with a call to `check`.

    Raises StorageUnavailable if each of MAX_RUNS runs needed files that weren't written yet.
    """
    files = StagedFiles(storage)
    for _ in range(MAX_RUNS):
        try:
            return await write(files)
        except FilesMissing:
            await files.write()
    raise StorageUnavailable(
        f"a transaction required different files in each of its {MAX_RUNS} runs"
    )
