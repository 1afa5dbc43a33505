"""Checkpoints: committed by a manifest that is written last, verified before they are loaded.

`{checkpoint_url}/step-{step:012d}/` holds `state.pt` (parameters, buffers, optimizer) and
`manifest.json`. The model is replicated, so one rank's copy is everybody's. There is no state of
a random number generator to keep: the loop draws every seed from (seed, step, rank), so step and
seed are all that it takes to go on to the bit, at any world size.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from dray import train
from ray_workers.contracts import CheckpointRef, FrameKind
from ray_workers.training import storage
from ray_workers.training.errors import BrokenCheckpointError
from ray_workers.training.stopping import sign_of

MANIFEST = "manifest.json"
STATE = "state.pt"
MANIFEST_VERSION = 1

State = Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    url: str
    step: int
    manifest_sha256: str
    size_bytes: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Loaded:
    saved: Saved
    state: State
    position: Mapping[str, Any]
    """As it was given to `save`."""


def save(
    base_url: str,
    step: int,
    state: State,
    *,
    metrics: Mapping[str, float],
    position: Mapping[str, int | str],
) -> Saved:
    """Write and commit a checkpoint. `position` says where the data stand and how the world was
    made up; `metrics` what was last measured. One rank calls it, between two steps."""
    url = f"{base_url.rstrip('/')}/step-{step:012d}"
    manifest_url = f"{url}/{MANIFEST}"
    storage.remove_file(manifest_url)  # while its files change, there is no checkpoint here
    size, sha256 = storage.write(
        f"{url}/{STATE}", lambda file: torch.save(dict(state), cast(IO[bytes], file))
    )
    manifest = {
        "version": MANIFEST_VERSION,
        "step": step,
        "position": dict(position),
        "rng": "seeds are derived from (seed, step, rank)",
        "metrics": dict(metrics),
        "torch": str(torch.__version__),
        "files": [{"path": STATE, "size_bytes": size, "sha256": sha256}],
    }
    text = json.dumps(manifest, indent=1).encode()
    manifest_size, manifest_sha256 = storage.write(manifest_url, lambda file: file.write(text))
    return Saved(url, step, manifest_sha256, size + manifest_size, dict(metrics))


def load(ref: CheckpointRef) -> Loaded:
    """Read and verify a checkpoint. Raises BrokenCheckpointError, which says what is wrong."""
    saved, manifest = read_manifest(ref)
    parts = {entry["path"]: _verified(saved.url, entry) for entry in manifest["files"]}
    state = torch.load(io.BytesIO(parts[STATE]), map_location="cpu", weights_only=True)
    return Loaded(saved, state, manifest["position"])


def read_manifest(ref: CheckpointRef) -> tuple[Saved, dict[str, Any]]:
    """What a checkpoint says of itself. Raises BrokenCheckpointError."""
    text = _read(f"{ref.url}/{MANIFEST}")
    sha256 = hashlib.sha256(text).hexdigest()
    if sha256 != ref.manifest_sha256:
        raise BrokenCheckpointError(
            f"the manifest of {ref.url} has the hash {sha256}, not {ref.manifest_sha256}"
        )
    manifest: dict[str, Any] = json.loads(text)
    if manifest["version"] != MANIFEST_VERSION:
        raise BrokenCheckpointError(
            f"{ref.url} has version {manifest['version']}; this dray reads {MANIFEST_VERSION}"
        )
    size = len(text) + sum(entry["size_bytes"] for entry in manifest["files"])
    return Saved(ref.url, manifest["step"], sha256, size, manifest["metrics"]), manifest


def superseded(saved: Sequence[Saved], *, keep: int, best: str | None) -> list[Saved]:
    """Those to drop, so that the `keep` newest and the best remain. Pure.

    Best is the lowest of a loss or an error, the highest of any other metric; of equals, the
    earliest.
    """
    newest = sorted(saved, key=lambda one: one.step)[-keep:]
    kept = {one.url for one in newest}
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


class Keeper:
    """Rank 0's side: saves, tells, and drops what `checkpoint.keep` no longer covers."""

    def __init__(self, base_url: str, *, keep: int, best: str | None) -> None:
        self._base_url = base_url
        self._keep = keep
        self._best = best
        self._saved: list[Saved] = []

    def adopt(self, refs: Sequence[CheckpointRef]) -> None:
        """Count these checkpoints of earlier attempts in: they are dropped like our own."""
        for ref in refs:
            try:
                self._saved.append(read_manifest(ref)[0])
            except BrokenCheckpointError as error:
                log(f"a checkpoint is left out of the count of those kept: {error}")

    def adopt_own(self) -> None:
        """Count in what a predecessor of this process has committed in this attempt."""
        known = {one.url for one in self._saved}
        for url in storage.folders(self._base_url):
            if url in known:
                continue
            try:
                text = _read(f"{url}/{MANIFEST}")
            except BrokenCheckpointError:  # it was still being written
                continue
            ref = CheckpointRef(url, 0, hashlib.sha256(text).hexdigest())
            self._saved.append(read_manifest(ref)[0])

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float],
        position: Mapping[str, int | str],
    ) -> None:
        saved = save(self._base_url, step, state, metrics=metrics, position=position)
        train.emit(
            FrameKind.CHECKPOINT,
            {
                "step": step,
                "url": saved.url,
                "size_bytes": saved.size_bytes,
                "manifest_sha256": saved.manifest_sha256,
                "metrics": saved.metrics,
            },
        )
        self._saved.append(saved)
        for old in superseded(self._saved, keep=self._keep, best=self._best):
            drop(old)
            self._saved.remove(old)


def drop(saved: Saved) -> None:
    """Delete a checkpoint, its manifest first: what is half deleted is then no checkpoint."""
    storage.remove_file(f"{saved.url}/{MANIFEST}")
    storage.remove_folder(saved.url)
    train.emit(FrameKind.CHECKPOINT_DROPPED, {"step": saved.step, "url": saved.url})


def newest_sound(refs: Sequence[CheckpointRef]) -> Loaded | None:
    """The first of `refs` that verifies. A broken one is passed over with a line in the log."""
    for ref in refs:
        try:
            return load(ref)
        except BrokenCheckpointError as error:
            log(f"passing over the checkpoint of step {ref.step}: {error}")
    return None


def log(sentence: str) -> None:
    """A line in the job's log, which is what its standard output is."""
    print(f"dray: {sentence}", flush=True)  # noqa: T201


def _verified(url: str, entry: Mapping[str, Any]) -> bytes:
    data = _read(f"{url}/{entry['path']}")
    if len(data) != entry["size_bytes"]:
        raise BrokenCheckpointError(
            f"{url}/{entry['path']} has {len(data)} bytes, not {entry['size_bytes']}"
        )
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise BrokenCheckpointError(f"{url}/{entry['path']} does not match its hash")
    return data


def _read(url: str) -> bytes:
    try:
        return storage.read(url)
    except OSError as error:
        raise BrokenCheckpointError(f"{url} cannot be read: {error}") from error
