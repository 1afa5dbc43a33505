"""The manifest of a checkpoint, which commits it and lists its files with their hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.train import files
from dray.train.checkpoints import CheckpointRef
from ray_workers.training.core.errors import BrokenCheckpointError, UnreachableCheckpointError

MANIFEST = "manifest.json"
MANIFEST_VERSION = 3
"""Version 1 stored the whole state in one file, `state.pt`, written by torch.save. Checkpoints of
version 1 can still be read. Version 2 has one file of tensors, and is also written today unless
several ranks write the state. Version 0 stands for a manifest without a version: the files of a
script, written by `dray.train.save_checkpoint`."""

_GONE = (FileNotFoundError, NotADirectoryError)
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors raised when reading a document that does not have the expected structure."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """The part of a manifest that does not describe files."""

    step: int
    metrics: Mapping[str, float]
    """Metrics from the evaluation after this step; empty if there was no evaluation."""
    position: Mapping[str, int | str]
    """The position from which to continue reading the data, and the world size."""
    loss: float | None = None
    """Training loss of the step."""


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    url: str
    step: int
    manifest_sha256: str
    size_bytes: int
    metrics: Mapping[str, float]


def url_of(base_url: str, step: int) -> str:
    return f"{base_url.rstrip('/')}/step-{step:012d}"


def read_manifest(ref: CheckpointRef) -> tuple[CommittedCheckpoint, dict[str, Any]]:
    """Read a checkpoint's manifest. Raises BrokenCheckpointError."""
    text = read_file(f"{ref.url}/{MANIFEST}")
    sha256 = hashlib.sha256(text).hexdigest()
    if sha256 != ref.manifest_sha256:
        raise BrokenCheckpointError(
            f"the manifest of {ref.url} has the hash {sha256} instead of {ref.manifest_sha256}"
        )
    try:
        manifest = {"version": 0, "position": {}, **json.loads(text)}
        if not 0 <= manifest["version"] <= MANIFEST_VERSION:
            raise BrokenCheckpointError(
                f"{ref.url} has version {manifest['version']}, but this version of dray "
                f"supports only versions up to {MANIFEST_VERSION}"
            )
        saved = _described(ref, len(text), manifest)
    except MALFORMED as error:
        raise BrokenCheckpointError(
            f"the manifest of {ref.url} does not describe a checkpoint: {error!r}"
        ) from error
    return saved, manifest


def _described(
    ref: CheckpointRef, num_bytes: int, manifest: Mapping[str, Any]
) -> CommittedCheckpoint:
    """Check the fields of a manifest. Raises LookupError, TypeError or ValueError."""
    if manifest["step"] != ref.step:
        raise ValueError(f"the manifest is for step {manifest['step']}, not step {ref.step}")
    for entry in manifest["files"]:
        if "/" in entry["path"] or not isinstance(entry["sha256"], str):
            raise ValueError(f"{entry['path']!r} is not the name of a checkpoint file")
        num_bytes += int(entry["size_bytes"])
    if len({entry["path"] for entry in manifest["files"]}) < len(manifest["files"]):
        raise ValueError("the manifest lists a file twice")
    loss = manifest.get("loss")
    dict(manifest["position"])
    metrics = {str(key): float(value) for key, value in dict(manifest["metrics"]).items()}
    if loss is not None:
        float(loss)
    return CommittedCheckpoint(ref.url, ref.step, ref.manifest_sha256, num_bytes, metrics)


def read_file(url: str) -> bytes:
    try:
        return files.read(url)
    except OSError as error:
        raise unreadable(url, error) from error


def unreadable(url: str, error: OSError) -> BrokenCheckpointError:
    kind = BrokenCheckpointError if isinstance(error, _GONE) else UnreachableCheckpointError
    return kind(f"{url} cannot be read: {error}")
