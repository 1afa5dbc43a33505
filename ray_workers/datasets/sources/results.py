"""Sources with `job://ID`: the result of another job, read from the storage."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dray.train import files
from dray.train.storage_faults import StorageError
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.core.types import Listed, Listing, Sink, TransferError
from ray_workers.datasets.sources.local import read_pieces
from ray_workers.shared.node_needs import DataPolicy


class ResultOrigin:
    """The files that the server has found for this job. Files in a storage folder are read in
    place."""

    def __init__(self, url: str, policy: DataPolicy, suffixes: tuple[str, ...] | None) -> None:
        self._location = url
        self._files = {
            one.name: one for one in policy.result if one.name.lower().endswith(suffixes or ("",))
        }

    def listing(self) -> Listing:
        if not self._files:
            raise broken(
                self._location,
                "has no result: the job does not exist, was deleted, or stored no model",
            )
        listed = [
            Listed(one.name, one.size_bytes, one.sha256, files.local_path(one.url))
            for _, one in sorted(self._files.items())
        ]
        return Listing(tuple(listed), is_folder=True)

    def fetch(self, file: Listed, sink: Sink) -> None:
        if file.path is not None:
            read_pieces(file.path, sink)
            return
        with tempfile.TemporaryDirectory(prefix="dray-base-") as folder:
            target = Path(folder, "file")
            try:
                files.fetch(self._files[file.name].url, target)
            except FileNotFoundError:
                raise broken(f"{self._location}/{file.name}", "was deleted") from None
            except StorageError as error:
                raise TransferError(f"the transfer failed: {error}") from error
            read_pieces(target, sink)
