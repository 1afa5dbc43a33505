"""Stores the names of a rank's series in the job's storage, for later attempts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dray.train import files
from ray_workers.node.found_metrics.lines import is_key
from ray_workers.node.found_metrics.runs import SeriesName

MAX_NAMES = 1000
"""Maximum number of stored names; the oldest are kept. A rank can't have more series."""
MAX_BYTES = 4 << 20


class StoredNames:
    """A small file with the names. Its methods block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._num_stored = 0

    def load(self) -> list[SeriesName]:
        """Return the names that earlier processes chose. Raises any error of the storage."""
        try:
            data = files.read(self._url)
        except FileNotFoundError:
            return []
        names = _decoded(data)
        self._num_stored = len(names)
        return names

    def save(self, names: Sequence[SeriesName]) -> None:
        """Store the names if there are new ones. Raises StorageError."""
        if len(names) <= self._num_stored:
            return
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([name._asdict() for name in names], file)
            file.flush()
            files.store(Path(file.name), self._url)
        self._num_stored = len(names)


def _decoded(data: bytes) -> list[SeriesName]:
    """Return the names up to the first invalid entry, since the job's own program can write
    anything."""
    names: list[SeriesName] = []
    try:
        found = json.loads(data[:MAX_BYTES])
        for entry in found[:MAX_NAMES]:
            names.append(_name_in(entry))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return names


def _name_in(entry: dict[str, Any]) -> SeriesName:
    run, texts = entry["run"], (entry["form"], entry["key"], entry["name"])
    is_fit = isinstance(run, list) and run and all(isinstance(part, str) for part in (*run, *texts))
    if not is_fit or not is_key(entry["key"]) or not is_key(entry["name"]):
        raise ValueError(f"not a valid series name: {entry!r}")
    return SeriesName(tuple(run), *texts)
