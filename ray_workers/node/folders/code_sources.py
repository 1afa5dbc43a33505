"""Uses the data sources to fetch code archives, and code that requires credentials.

The data sources import torch, so `remote_code` imports this module only when it is needed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.code.manifest import MAX_FILES
from ray_workers.datasets.core.errors import Budget
from ray_workers.datasets.formats.archives import unpack_code
from ray_workers.datasets.sources.credentials import headers_for, load_credentials
from ray_workers.datasets.sources.http import HttpOrigin
from ray_workers.datasets.sources.source import SourceFile, location_of, retried
from ray_workers.node.folders import git_commit
from ray_workers.node.folders.git_commit import (
    CodeRefused,
    CodeUnreachable,
    GitCommit,
    check_paths,
    too_large,
)
from ray_workers.shared.node_needs import RemoteCodeRef
from ray_workers.training.core.errors import DataError, SourceUnavailableError


def fetch(code: RemoteCodeRef, target: Path, scratch: Path, limit_s: float) -> list[str]:
    """Like `ray_workers.node.folders.remote_code.fetch`, for code with credentials or in an
    archive. Returns the paths of the files."""
    try:
        credentials = load_credentials(code.policy.credentials_dir, code.credentials)
        if code.git is None:
            return _fetch_archive(code, credentials, target, scratch, limit_s)
        headers = headers_for(code.git, credentials)
        return git_commit.fetch(GitCommit.of(code, headers, limit_s), target, scratch)
    except DataError as error:
        raise CodeRefused(str(error).replace("data.credentials", "code.credentials")) from None
    except SourceUnavailableError as error:
        raise CodeUnreachable(str(error)) from None


def _fetch_archive(
    code: RemoteCodeRef,
    credentials: Mapping[str, Any],
    target: Path,
    scratch: Path,
    limit_s: float,
) -> list[str]:
    url, deadline = code.url or "", time.monotonic() + limit_s
    location, packed = location_of(url), scratch / "archive"
    origin = HttpOrigin(url, code.policy, credentials, None)

    def download() -> str:
        digest, size = hashlib.sha256(), 0

        def write(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size > code.limit_bytes:
                raise too_large("the archive is too large", code.limit_bytes)
            if time.monotonic() > deadline:
                raise CodeUnreachable(f"{location} could not be fetched within {limit_s:g} s")
            digest.update(piece)
            file.write(piece)

        with packed.open("wb") as file:
            origin.fetch(origin.listing().files[0], write)
        return digest.hexdigest()

    found = retried(download, location)
    if found != code.sha256:
        raise CodeRefused(
            f"{location} has the SHA-256 {found}, which differs from script.code.sha256"
        )
    budget = _CodeBudget(location, code.limit_bytes, deadline)
    paths = unpack_code(SourceFile(packed.name, packed, location), target, budget)
    check_paths(paths)
    return paths


class _CodeBudget(Budget):
    """Limits the size and the number of members of unpacked code, and the time for unpacking it."""

    def __init__(self, location: str, limit_bytes: int, deadline: float) -> None:
        super().__init__(location, limit_bytes, "DRAY_CODE_LIMIT_BYTES")
        self._deadline = deadline
        self._members_left = 2 * MAX_FILES  # including folders

    def spend_member(self) -> None:
        self._members_left -= 1
        if self._members_left < 0:
            raise DataError(f"the archive has more than {2 * MAX_FILES} files and folders")

    def spend(self, size_bytes: int) -> None:
        if time.monotonic() > self._deadline:
            raise DataError("the archive takes too long to unpack")
        super().spend(size_bytes)
