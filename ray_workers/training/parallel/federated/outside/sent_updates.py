"""Reads the clients' updates for a round from the files that the service has written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import fsspec
import torch
from torch import Tensor

from dray.train import files
from dray.train.storage_faults import StorageError
from ray_workers.shared import round_files
from ray_workers.shared.job_log import log
from ray_workers.shared.round_files import SentUpdate
from ray_workers.training.parallel.federated.aggregation.update_checks import Verdict, judged


class DamagedUpdateError(Exception):
    """Raised if the parts of an update don't match its announcement."""


class SentUpdates:
    """The updates of a round that have been received so far. Each update is checked only once."""

    def __init__(self, folder: str, num_elements: int, max_norm: float) -> None:
        self._folder = folder
        self._num_elements = num_elements
        self._max_norm = max_norm
        self.sent: dict[int, SentUpdate] = {}
        self.accepted: set[int] = set()
        self.readable: set[int] = set()
        """Clients whose updates are readable, but were rejected."""
        self._damaged: set[int] = set()

    @property
    def refused(self) -> set[int]:
        return self.readable | self._damaged

    @property
    def clients(self) -> set[int]:
        return self.accepted | self.refused

    def look(self, moved: Callable[[], None]) -> None:
        """Read the new updates. Only the first update of a client counts."""
        for name in names_below(f"{self._folder}/{round_files.UPDATES}"):
            stem, _, suffix = name.partition(".")
            if suffix != "json" or not stem.isdecimal() or int(stem) in self.clients:
                continue
            moved()
            self._take(int(stem))

    def _take(self, client: int) -> None:
        try:
            content = read_file(f"{self._folder}/{round_files.update_path(client)}")
            sent = SentUpdate.from_json(content)
            if sent.client != client:
                raise ValueError("the file names another client")
            update = read_update(self._folder, sent, self._num_elements)
        except (DamagedUpdateError, ValueError) as error:
            log(f"the update of client {client} is refused: {error}")
            self._damaged.add(client)
            return
        self.sent[client] = sent
        verdict, _ = judged(update, self._num_elements, self._max_norm)
        (self.accepted if verdict is Verdict.ACCEPTED else self.readable).add(client)


def read_update(folder: str, sent: SentUpdate, num_elements: int) -> Tensor:
    """Read an update: float32 (elements,), on the CPU. Raises DamagedUpdateError, StorageError."""
    num_bytes = num_elements * round_files.ELEMENT_BYTES
    content = read_parts(folder, sent.client, sent.sha256, num_bytes)
    return torch.frombuffer(content, dtype=torch.float32)


def read_parts(folder: str, client: int, sha256: str, num_bytes: int) -> bytearray:
    """Read and join the parts of a client's update. Raises DamagedUpdateError or StorageError."""
    content = bytearray()
    for part in range(round_files.num_parts(num_bytes)):
        url = f"{folder}/{round_files.part_path(client, part)}"
        try:
            content += read_file(url)
        except FileNotFoundError:
            raise DamagedUpdateError(f"part {part} of the update is missing") from None
    if len(content) != num_bytes:
        raise DamagedUpdateError("the update's size differs from the model's size")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedUpdateError("the update does not match the hash that the client announced")
    return content


def read_file(url: str) -> bytes:
    """Read a file. Raises FileNotFoundError, or StorageError for any other failure."""
    try:
        return files.read(url)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{url} can't be read: {error}") from error


def names_below(url: str) -> list[str]:
    """Return the sorted names directly below a URL; empty if the URL doesn't exist. Raises
    StorageError."""
    path = files.local_path(url)
    try:
        if path is not None:
            return sorted(entry.name for entry in path.iterdir())
        filesystem, folder = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        found = filesystem.ls(folder, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except Exception as error:  # storage clients raise many types
        raise StorageError(f"{url} can't be listed: {error}") from error
    return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)
