"""Committed checkpoints of an attempt, taken from the storage: their reports may be lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator

from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.names import attempt_prefix
from service.checkpoints.catalog import MALFORMED, MANIFEST, files_of
from service.storage.storage import Storage

MAX_FOUND = 100
"""Checkpoints of one attempt that are looked at, the newest."""
MAX_MANIFEST_BYTES = 16 << 20


def committed(storage: Storage, job_id: str, attempt: int) -> Iterator[Frame]:
    """The report of each committed checkpoint, newest first, as its rank would have made it.

    Blocking. StorageUnavailable if the storage fails. A checkpoint counts if its manifest is of its
    step and every file has its size; a rank that loads it compares the hashes.
    """
    base = f"{attempt_prefix(job_id, attempt)}/checkpoints"
    folders = [name for name in storage.names(base) if name.startswith("step-")]
    for name in folders[: -MAX_FOUND - 1 : -1]:
        with contextlib.suppress(FileNotFoundError, *MALFORMED):  # not committed, or no checkpoint
            yield _report(storage, f"{base}/{name}", int(name.removeprefix("step-")))


def _report(storage: Storage, key: str, step: int) -> Frame:
    manifest_key = f"{key}/{MANIFEST}"
    if not 0 < storage.size_bytes(manifest_key) <= MAX_MANIFEST_BYTES:
        raise ValueError("its manifest has no sensible size")
    text = storage.read_bytes(manifest_key)
    manifest = json.loads(text)
    files = files_of(manifest)
    if manifest["step"] != step:
        raise ValueError("its manifest is of another step")
    if any(storage.size_bytes(f"{key}/{file.path}") != file.size_bytes for file in files):
        raise ValueError("a file of it is not whole")
    body = {
        "step": step,
        "url": storage.url_of(key),
        "size_bytes": len(text) + sum(file.size_bytes for file in files),
        "manifest_sha256": hashlib.sha256(text).hexdigest(),
        "metrics": dict(manifest["metrics"]),
    }
    return Frame(rank=0, incarnation=0, kind=FrameKind.CHECKPOINT, time=time.time(), body=body)
