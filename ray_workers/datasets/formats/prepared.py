"""The prepared form of a data set: a folder with `.npy` files and `meta.json`, built once per node.

A build only needs memory for one piece at a time, regardless of the size of the data set. A reader
only needs memory for the samples that it reads, because the files are memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import Budget, broken, reading
from ray_workers.datasets.sources.node_cache import NodeCache
from ray_workers.datasets.sources.source import Content, Source, SourceFile, location_of
from ray_workers.shared.node_needs import DataPolicy

FORMAT_VERSION = 1
"""Part of every cache key. Change this value whenever the output of a build changes."""
_META = "meta.json"


@dataclass(frozen=True)
class Workshop:
    """The files and folders of a build."""

    location: str
    """Name of the source in errors."""
    files: tuple[SourceFile, ...]
    is_folder: bool
    output: Path
    """Folder for the `.npy` files."""
    scratch: Path
    """Folder for temporary files."""
    budget: Budget


Build = Callable[[Workshop], Mapping[str, Any]]
"""Writes the arrays and returns their metadata, as JSON data."""


@dataclass(frozen=True)
class Prepared:
    folder: Path
    meta: Mapping[str, Any]
    fingerprint: str

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the array, memory-mapped and read-only. A page is read when it is accessed."""
        mapped: npt.NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return mapped


def prepare(
    data: spec.Data,
    policy: DataPolicy,
    how: Mapping[str, Any],
    build: Build,
    *,
    suffixes: tuple[str, ...] | None = None,
) -> Prepared:
    """Return the prepared form of the source, from the node's cache or newly built.

    how: everything that determines the result apart from the content, as JSON data. suffixes: if
    the source is a folder, the suffixes (in lower case) of the files to use; None requires a single
    file. Raises DataError, SourceUnavailableError and any error of `build`.
    """
    with reading(location_of(data.source)):
        cache = NodeCache.of(policy)
        source = Source(data.source, policy, cache, data.credentials, suffixes)
        with cache.lock(data.source):
            content = source.identify(size_bytes=data.size_bytes, sha256=data.sha256)
            text = json.dumps([FORMAT_VERSION, content.sha256, how], sort_keys=True)
            fingerprint = hashlib.sha256(text.encode()).hexdigest()
            folder = cache.hold("prepared", fingerprint)
            if folder is None:
                folder = _build(cache, source, content, fingerprint, build)
                cache.sweep()
        return Prepared(folder, json.loads((folder / _META).read_text()), fingerprint)


def _build(
    cache: NodeCache, source: Source, content: Content, fingerprint: str, build: Build
) -> Path:
    try:
        files = source.files(content)
        with cache.scratch() as scratch:
            output = scratch / "prepared"
            output.mkdir()
            budget = Budget(source.location, cache.limit_bytes)
            shop = Workshop(source.location, files, content.is_folder, output, scratch, budget)
            (output / _META).write_text(json.dumps(build(shop)))
            if not source.is_unchanged():
                raise broken(source.location, "changed while it was being read")
            return cache.add("prepared", fingerprint, output)
    finally:
        source.release()


def read_small_file(url: str, policy: DataPolicy, limit_bytes: int) -> bytes:
    """Return the content of a single file, such as a tokenizer. Raises DataError or
    SourceUnavailableError."""
    with reading(location_of(url)):
        cache = NodeCache.of(policy)
        source = Source(url, policy, cache, None, None)
        with cache.lock(url):
            content = source.identify(size_bytes=None, sha256=None)
            if content.files[0][2] > limit_bytes:
                raise broken(source.location, f"has more than {limit_bytes:,} bytes")
            try:
                return source.files(content)[0].path.read_bytes()
            finally:
                source.release()


class ArrayWriter:
    """A `.npy` file that grows along its first dimension, piece by piece."""

    def __init__(
        self, folder: Path, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, budget: Budget
    ) -> None:
        """Create the file. shape: shape of a row."""
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._budget = budget
        self._file = (folder / f"{name}.npy").open("wb")
        self.num_rows = 0
        self._write_header()

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Append (n, *shape) rows of any type that converts to the file's type without loss."""
        assert rows.shape[1:] == self._shape, (rows.shape, self._shape)
        rows = np.ascontiguousarray(rows, dtype=self._dtype)
        self._budget.spend(rows.nbytes)
        self._file.write(rows.data)
        self.num_rows += len(rows)

    def _write_header(self) -> None:
        """Write the header, in which numpy reserves space for the growth of the first dimension."""
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self.num_rows, *self._shape),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            end = self._file.tell()
            self._file.seek(0)
            self._write_header()
            assert end == self._file.tell() + self.num_rows * self._row_bytes()
        self._file.close()

    def _row_bytes(self) -> int:
        return self._dtype.itemsize * int(np.prod(self._shape, dtype=np.int64))
