"""Reads and writes checkpoints. A checkpoint is committed by writing its manifest last, and is
verified before it is loaded.

`{checkpoint_url}/step-{step:012d}/` contains `state.safetensors` (the tensors of the model and the
optimizer, including buffers), `state.json` (the rest of the state, and where each tensor belongs in
the state), and `manifest.json`. The model is replicated, so a checkpoint contains the copy of one
rank. The states of random number generators are not saved: the loop derives every seed from (seed,
step, rank), so the step and the seed are sufficient to continue with bitwise identical results at
any world size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dray import train
from dray.train import files
from dray.train.checkpoints import CheckpointRef, staying
from dray.train.files import local_path
from dray.train.spool import EVERYTHING, Known
from ray_workers.shared.frames import CheckpointDroppedReport
from ray_workers.training.checkpoint import direct_io, safetensors_layout
from ray_workers.training.checkpoint.staging import StagedState, Stager
from ray_workers.training.core.errors import BrokenCheckpointError, UnreachableCheckpointError
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint
from ray_workers.training.core.schedule import sign_of

MANIFEST = "manifest.json"
TENSORS = "state.safetensors"
TREE = "state.json"
OLD_STATE = "state.pt"
MANIFEST_VERSION = 2
"""Version 1 stored the whole state in one file, `state.pt`, written by torch.save. Checkpoints of
version 1 can still be read."""
RNG = "seeds are derived from (seed, step, rank)"

_GONE = (FileNotFoundError, NotADirectoryError)
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
"""Errors raised when reading a document that does not have the expected structure."""

State = Mapping[str, Any]


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


@dataclass(frozen=True)
class LoadedCheckpoint:
    saved: CommittedCheckpoint
    state: State
    position: Mapping[str, Any]
    """The position that was passed to `save`."""
    loss: float | None


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that training could not resume from."""

    step: int
    why: str
    is_reached: bool = True
    """Whether the checkpoint could be read. If the storage raised an error instead, the checkpoint
    may be intact."""


def url_of(base_url: str, step: int) -> str:
    return f"{base_url.rstrip('/')}/step-{step:012d}"


def save(base_url: str, about: CheckpointMetadata, state: State) -> CommittedCheckpoint:
    """Write a checkpoint and wait until it is committed."""
    return commit(base_url, about, Stager().take(state))


def commit(base_url: str, about: CheckpointMetadata, snapshot: StagedState) -> CommittedCheckpoint:
    """Write a staged state, with its manifest last. After an error, neither a checkpoint nor a
    partial file remains."""
    url = url_of(base_url, about.step)
    try:
        return _commit(url, about, snapshot)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_folder(url)
        raise


def _commit(url: str, about: CheckpointMetadata, snapshot: StagedState) -> CommittedCheckpoint:
    manifest_url = f"{url}/{MANIFEST}"
    faultpoint(FaultPoint.BEFORE_WRITE, about.step)
    files.remove_file(manifest_url)  # invalidate the checkpoint while its files change
    tree = json.dumps(snapshot.tree).encode()
    entries = []
    snapshot.wait()
    for path, data, num_bytes in (
        (TENSORS, snapshot.data, snapshot.num_bytes),
        (TREE, memoryview(tree), len(tree)),
    ):
        sha256 = direct_io.write_buffer(f"{url}/{path}", data, num_bytes)
        entries.append({"path": path, "size_bytes": num_bytes, "sha256": sha256})
    manifest = {
        "version": MANIFEST_VERSION,
        "step": about.step,
        "position": dict(about.position),
        "rng": RNG,
        "metrics": dict(about.metrics),
        "loss": about.loss,
        "torch": str(torch.__version__),
        "files": entries,
    }
    text = json.dumps(manifest, indent=1).encode()
    faultpoint(FaultPoint.BEFORE_MANIFEST, about.step)
    manifest_sha256 = direct_io.write_buffer(manifest_url, memoryview(text), len(text))
    files.sync_names(url)
    faultpoint(FaultPoint.CHECKPOINT_COMMITTED, about.step)
    size = snapshot.num_bytes + len(tree) + len(text)
    return CommittedCheckpoint(url, about.step, manifest_sha256, size, dict(about.metrics))


def load(ref: CheckpointRef) -> LoadedCheckpoint:
    """Verify and read a checkpoint. Raises BrokenCheckpointError with the reason.

    Tensors in files on a file system are memory-mapped instead of read: the ranks on a node share
    the memory, and a rank that needs only a part of the state reads only this part.
    """
    saved, manifest = read_manifest(ref)
    parts = {entry["path"]: _verified(saved.url, entry) for entry in manifest["files"]}
    try:
        state = _state_of(parts)
    except (*MALFORMED, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise BrokenCheckpointError(
            f"{ref.url} does not contain a training state: {error!r}"
        ) from error
    return LoadedCheckpoint(saved, state, manifest["position"], manifest.get("loss"))


def _state_of(parts: Mapping[str, Path | bytes]) -> State:
    if OLD_STATE in parts:
        old = io.BytesIO(_bytes_of(parts[OLD_STATE]))
        state = torch.load(old, map_location="cpu", weights_only=True)
    else:
        tensors = safetensors_layout.read_tensors(parts[TENSORS])
        state = safetensors_layout.restore(json.loads(_bytes_of(parts[TREE])), tensors)
    if not isinstance(state, dict):
        raise ValueError(f"it is a {type(state).__name__}")
    return state


def read_manifest(ref: CheckpointRef) -> tuple[CommittedCheckpoint, dict[str, Any]]:
    """Read a checkpoint's manifest. Raises BrokenCheckpointError."""
    text = _read(f"{ref.url}/{MANIFEST}")
    sha256 = hashlib.sha256(text).hexdigest()
    if sha256 != ref.manifest_sha256:
        raise BrokenCheckpointError(
            f"the manifest of {ref.url} has the hash {sha256} instead of {ref.manifest_sha256}"
        )
    try:
        manifest = json.loads(text)
        if not 1 <= manifest["version"] <= MANIFEST_VERSION:
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
    loss = manifest.get("loss")
    dict(manifest["position"])
    metrics = {str(key): float(value) for key, value in dict(manifest["metrics"]).items()}
    if loss is not None:
        float(loss)
    return CommittedCheckpoint(ref.url, ref.step, ref.manifest_sha256, num_bytes, metrics)


def committed(base_url: str) -> list[CommittedCheckpoint]:
    """Return the checkpoints below a URL whose manifest exists and is valid, oldest first."""
    found = []
    for url in direct_io.folders(base_url):
        step = url.rpartition("/step-")[2]
        try:
            sha256 = hashlib.sha256(_read(f"{url}/{MANIFEST}")).hexdigest()
            found.append(read_manifest(CheckpointRef(url, int(step), sha256))[0])
        except (BrokenCheckpointError, ValueError):  # unfinished, or not a checkpoint
            continue
    return sorted(found, key=lambda one: one.step)


def superseded(
    saved: Sequence[CommittedCheckpoint],
    *,
    keep: int,
    best: str | None,
    reported: Mapping[str, float] | None = None,
    known: Known = EVERYTHING,
) -> list[CommittedCheckpoint]:
    """Return the checkpoints to delete: all except the best checkpoint and the checkpoints that
    `dray.train.checkpoints.staying` returns. A pure function.

    The best checkpoint has the lowest loss or error, or the highest value of any other metric; if
    several checkpoints have this value, the earliest of them is the best.
    """
    in_order = [one.url for one in sorted(saved, key=lambda one: one.step)]
    kept = staying(in_order, keep=keep, reported=reported or {}, known=known)
    if best is not None:
        sign = sign_of(best)
        measured = [
            (sign * one.metrics[best], one.step, one.url)
            for one in saved
            if not math.isnan(one.metrics.get(best, math.nan))
        ]
        if measured:
            kept.add(min(measured)[2])
    return [one for one in saved if one.url not in kept]


def drop(saved: CommittedCheckpoint) -> None:
    """Delete a checkpoint, starting with its manifest, so that a partly deleted checkpoint is
    invalid."""
    files.remove_file(f"{saved.url}/{MANIFEST}")
    files.remove_folder(saved.url)
    report = CheckpointDroppedReport(saved.step, saved.url)
    train.emit(report.KIND, report.body())


def drop_unfinished(base_url: str) -> None:
    """Delete checkpoints below this URL that a process began to write but did not commit before it
    died."""
    for url in direct_io.folders(base_url):
        if not direct_io.exists(f"{url}/{MANIFEST}"):
            files.remove_folder(url)


def load_each(refs: Sequence[CheckpointRef]) -> Iterator[LoadedCheckpoint | SkippedCheckpoint]:
    """Load each of `refs` in order, and yield the checkpoint, or the reason why it can't be
    loaded."""
    for ref in refs:
        try:
            yield load(ref)
        except BrokenCheckpointError as error:
            is_reached = not isinstance(error, UnreachableCheckpointError)
            yield SkippedCheckpoint(ref.step, str(error), is_reached)


def _verified(url: str, entry: Mapping[str, Any]) -> Path | bytes:
    """Return the path of a checkpoint's file, or the file's content if the storage is not a file
    system."""
    name = f"{url}/{entry['path']}"
    path = local_path(name)
    found: Path | bytes
    try:
        if path is None:
            found = files.read(name)
            num_bytes, sha256 = len(found), hashlib.sha256(found).hexdigest()
        else:
            found = path
            num_bytes, sha256 = files.measure(path)
    except OSError as error:
        raise _unreadable(name, error) from error
    if num_bytes != entry["size_bytes"]:
        raise BrokenCheckpointError(
            f"{name} has {num_bytes} bytes instead of {entry['size_bytes']}"
        )
    if sha256 != entry["sha256"]:
        raise BrokenCheckpointError(f"{name} does not match its hash")
    return found


def _bytes_of(part: Path | bytes) -> bytes:
    return part.read_bytes() if isinstance(part, Path) else part


def _read(url: str) -> bytes:
    try:
        return files.read(url)
    except OSError as error:
        raise _unreadable(url, error) from error


def _unreadable(url: str, error: OSError) -> BrokenCheckpointError:
    kind = BrokenCheckpointError if isinstance(error, _GONE) else UnreachableCheckpointError
    return kind(f"{url} cannot be read: {error}")
