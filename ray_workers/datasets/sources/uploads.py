"""Sources with `upload://FILE_ID`: files that users have uploaded, in the server's storage.

The server has checked that the files belong to the owner of the job. An uploaded file never
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from dray.spec.training.data import uploaded_files
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import Listed, Listing, Sink, TransferError
from ray_workers.shared.names import upload_name
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError

PIECE_BYTES = 8 << 20
NAMES = ("train.jsonl", "validation.jsonl")


class UploadOrigin:
    """An uploaded file, or two uploaded files that form a folder and are named like the splits."""

    def __init__(self, url: str, policy: DataPolicy) -> None:
        self._location = url
        if policy.uploads_url is None:
            raise broken(url, "this process can't read uploaded files")
        self._filesystem: Any
        self._filesystem, root = fsspec.core.url_to_fs(policy.uploads_url)
        self._paths = {
            name: f"{str(root).rstrip('/')}/{upload_name(file_id)}"
            for name, file_id in zip(NAMES, uploaded_files(url), strict=False)
        }

    def listing(self) -> Listing:
        files = tuple(self._listed(name, path) for name, path in self._paths.items())
        return Listing(files, is_folder=len(files) > 1)

    def _listed(self, name: str, path: str) -> Listed:
        with self._translating_errors():
            size = int(self._filesystem.size(path))
        is_local = "file" in self._filesystem.protocol
        return Listed(name, size, version=path, path=Path(path) if is_local else None)

    def fetch(self, file: Listed, sink: Sink) -> None:
        with (
            self._translating_errors(),
            self._filesystem.open(self._paths[file.name], "rb") as source,
        ):
            while piece := source.read(PIECE_BYTES):
                sink(piece)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except DataError:  # of the sink
            raise
        except FileNotFoundError:
            raise broken(self._location, "the uploaded file was deleted") from None
        except Exception as error:  # each object store has its own exceptions
            raise TransferError(f"the storage failed ({type(error).__name__})") from error
