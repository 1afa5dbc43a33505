"""Reads and writes checkpoints. A checkpoint is committed by writing its manifest last, and is
verified before it is loaded.

`{checkpoint_url}/step-{step:012d}/` contains `state.safetensors` (the tensors of the model and the
optimizer, including buffers), `state.json` (the rest of the state, and where each tensor belongs in
the state), and `manifest.json`. If the state is divided, each rank writes its pieces to a file such
as `state-g0-00003-of-00008.safetensors`, and `state.json` lists the pieces of each tensor.

The states of random number generators are not saved: the loop derives every seed from (seed, step,
rank), so the step and the seed are sufficient to continue with bitwise identical results at any
world size.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dray import train
from dray.train import files
from dray.train.checkpoints import CheckpointRef
from dray.train.files import local_path
from ray_workers.shared.frames import CheckpointDroppedReport
from ray_workers.training.checkpoint import direct_io, safetensors_layout
from ray_workers.training.checkpoint.manifests import (
    MALFORMED,
    MANIFEST,
    MANIFEST_VERSION,
    CheckpointMetadata,
    CommittedCheckpoint,
    read_file,
    read_manifest,
    unreadable,
    url_of,
)
from ray_workers.training.checkpoint.save_group import (
    NotFiniteError,
    RankReport,
    SaveAbandonedError,
    SharedSave,
    merged,
)
from ray_workers.training.checkpoint.staging import StagedState, Stager
from ray_workers.training.checkpoint.stored_tensors import StoredFile, mapped, stored_tensors
from ray_workers.training.core.errors import BrokenCheckpointError, UnreachableCheckpointError
from ray_workers.training.core.faultpoints import FaultPoint, faultpoint

TENSORS = "state.safetensors"
TREE = "state.json"
OLD_STATE = "state.pt"
RNG = "seeds are derived from (seed, step, rank)"


State = Mapping[str, Any]


@dataclass(frozen=True)
class LoadedCheckpoint:
    saved: CommittedCheckpoint
    state: State
    position: Mapping[str, Any]
    """The position that was passed to `save`."""
    loss: float | None


class SkippedCheckpoint(NamedTuple):
    """A checkpoint from which training could not resume."""

    step: int
    why: str
    is_reached: bool = True
    """Whether the checkpoint could be read. If the storage raised an error instead, the checkpoint
    may be intact."""


def save(base_url: str, about: CheckpointMetadata, state: State) -> CommittedCheckpoint:
    """Write a checkpoint and wait until it is committed."""
    return commit(base_url, about, Stager().take(state))


def commit(
    base_url: str,
    about: CheckpointMetadata,
    snapshot: StagedState,
    wrote: Callable[[], None] = lambda: None,
) -> CommittedCheckpoint:
    """Write a staged state, with its manifest last. After an error, neither a checkpoint nor a
    partial file remains. wrote: see `direct_io.write_buffer`."""
    url = url_of(base_url, about.step)
    with _removed_after_error(url):
        faultpoint(FaultPoint.BEFORE_WRITE, about.step)
        files.remove_file(f"{url}/{MANIFEST}")  # invalidate the checkpoint while its files change
        entries = [_write_tensors(f"{url}/{TENSORS}", snapshot, wrote)]
        return _commit_files(url, about, 2, entries, snapshot.tree)


@contextlib.contextmanager
def _removed_after_error(url: str, *, unless_committed: bool = False) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if not (unless_committed and direct_io.exists(f"{url}/{MANIFEST}")):
                files.remove_folder(url)
        raise


def _write_tensors(url: str, snapshot: StagedState, wrote: Callable[[], None]) -> dict[str, Any]:
    snapshot.wait()
    sha256 = direct_io.write_buffer(url, snapshot.data, snapshot.num_bytes, wrote)
    path = url.rpartition("/")[2]
    return {"path": path, "size_bytes": snapshot.num_bytes, "sha256": sha256}


def _commit_files(
    url: str, about: CheckpointMetadata, version: int, entries: Sequence[Any], state: Any
) -> CommittedCheckpoint:
    """Write the document with the state, and then the manifest. entries: the files of tensors."""
    tree = json.dumps(state).encode()
    sha256 = direct_io.write_buffer(f"{url}/{TREE}", memoryview(tree), len(tree))
    entries = [*entries, {"path": TREE, "size_bytes": len(tree), "sha256": sha256}]
    manifest = {
        "version": version,
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
    manifest_sha256 = direct_io.write_buffer(f"{url}/{MANIFEST}", memoryview(text), len(text))
    files.sync_names(url)
    faultpoint(FaultPoint.CHECKPOINT_COMMITTED, about.step)
    size = len(text) + sum(entry["size_bytes"] for entry in entries)
    return CommittedCheckpoint(url, about.step, manifest_sha256, size, dict(about.metrics))


def write_share(base_url: str, step: int, snapshot: StagedState, save: SharedSave) -> RankReport:
    """Write this rank's file of a checkpoint, and return the information that rank 0 needs to
    commit the checkpoint."""
    url = url_of(base_url, step)
    faultpoint(FaultPoint.BEFORE_WRITE, step)
    if save.rank == 0:
        files.remove_file(f"{url}/{MANIFEST}")
    entry = _write_tensors(f"{url}/{save.file_name}", snapshot, save.wrote)
    faultpoint(FaultPoint.SHARE_WRITTEN, step)
    tensors = {
        one.name: {
            "dtype": safetensors_layout.DTYPES[one.dtype],
            "shape": list(one.whole),
            "pieces": [[save.file_name, one.start, list(one.offsets), list(one.shape)]],
        }
        for one in snapshot.locations
    }
    return RankReport(entry, snapshot.tree, tensors)


def commit_shares(
    base_url: str, about: CheckpointMetadata, save: SharedSave
) -> CommittedCheckpoint:
    """Commit the files that the ranks write, when all ranks have written them. After an error, no
    checkpoint remains. Raises NotFiniteError if the state of a rank contains non-finite values."""
    url = url_of(base_url, about.step)
    # If this rank is cut off, the next group may have committed the checkpoint.
    with _removed_after_error(url, unless_committed=True):
        reports = save.reports()
        if not all(report.is_finite for report in reports):
            raise NotFiniteError
        problems = [report.problem for report in reports if report.problem is not None]
        if problems:
            raise SaveAbandonedError(problems[0])
        entries = {str(report.file["path"]): dict(report.file) for report in reports}
        state = merged(reports)
        sizes = {name: StoredFile(torch.empty, one["size_bytes"]) for name, one in entries.items()}
        stored_tensors(state["tensors"], sizes)  # checks the pieces
        for name in entries:
            if not direct_io.exists(f"{url}/{name}"):
                raise SaveAbandonedError(
                    f"{url}/{name}, which another rank has written, is missing on the node of rank "
                    "0: all nodes must access the same storage"
                )
    with _removed_after_error(url):
        direct_io.keep_only(url, entries.keys())  # an interrupted save may have left other files
        return _commit_files(url, about, MANIFEST_VERSION, list(entries.values()), state)


def load(ref: CheckpointRef, *, number: int = 0, num_ranks: int = 1) -> LoadedCheckpoint:
    """Verify and read a checkpoint. Raises BrokenCheckpointError with the reason.

    number, num_ranks: if several ranks have written the state, verify the hashes of only this
    rank's share of their files; the ranks together verify all files. The tensors of such a state
    are read when they are copied.

    Tensors in files on a file system are memory-mapped instead of read: the ranks on a node share
    the memory, and a rank that needs only a part of the state reads only this part.
    """
    saved, manifest = read_manifest(ref)
    entries = manifest["files"]
    try:
        if manifest["version"] < MANIFEST_VERSION:
            parts = {entry["path"]: _verified(saved.url, entry) for entry in entries}
            state = _state_of(parts)
        else:
            state = _divided_state(saved.url, entries, number, num_ranks)
    except (*MALFORMED, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise BrokenCheckpointError(
            f"{ref.url} does not contain a training state: {error!r}"
        ) from error
    return LoadedCheckpoint(saved, state, manifest["position"], manifest.get("loss"))


def _divided_state(
    url: str, entries: Sequence[Mapping[str, Any]], number: int, num_ranks: int
) -> State:
    found: dict[str, StoredFile] = {}
    document, own = b"", []
    for at, entry in enumerate(entries):
        name = f"{url}/{entry['path']}"
        if entry["path"] == TREE:
            document = _bytes_of(_verified(url, entry))
            continue
        found[entry["path"]] = _opened(name, int(entry["size_bytes"]))
        if at % num_ranks == number:
            own.append((name, entry))
    # The files are open, so that a file that is replaced while it is hashed is not read.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // num_ranks)) as threads:
        for _ in threads.map(lambda one: _check(one[0], one[1], direct_io.measure), own):
            pass
    return _divided_tree(json.loads(document), found)


def _divided_tree(described: Mapping[str, Any], found: Mapping[str, StoredFile]) -> State:
    tensors = stored_tensors(described["tensors"], found)
    return _as_state(safetensors_layout.restore(described["tree"], tensors))


def _opened(url: str, num_bytes: int) -> StoredFile:
    path = local_path(url)
    if path is None:
        return StoredFile(functools.partial(_read_range, url), num_bytes)
    try:
        return StoredFile(mapped(path, num_bytes), num_bytes)
    except OSError as error:
        raise unreadable(url, error) from error


def _read_range(url: str, start: int, num_bytes: int) -> Tensor:
    try:
        content = direct_io.read_range(url, start, num_bytes)
    except OSError as error:
        raise unreadable(url, error) from error
    if len(content) != num_bytes:
        raise BrokenCheckpointError(f"{url} ends before byte {start + num_bytes}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _state_of(parts: Mapping[str, Path | bytes]) -> State:
    if OLD_STATE in parts:
        old = io.BytesIO(_bytes_of(parts[OLD_STATE]))
        state = torch.load(old, map_location="cpu", weights_only=True)
    else:
        tensors = safetensors_layout.read_tensors(parts[TENSORS])
        state = safetensors_layout.restore(json.loads(_bytes_of(parts[TREE])), tensors)
    return _as_state(state)


def _as_state(state: Any) -> State:
    if not isinstance(state, dict):
        raise ValueError(f"it is a {type(state).__name__}")
    return state


def committed(base_url: str) -> list[CommittedCheckpoint]:
    """Return the checkpoints below a URL whose manifest exists and is valid, oldest first."""
    found = []
    for url in direct_io.folders(base_url):
        step = url.rpartition("/step-")[2]
        try:
            sha256 = hashlib.sha256(read_file(f"{url}/{MANIFEST}")).hexdigest()
            found.append(read_manifest(CheckpointRef(url, int(step), sha256))[0])
        except (BrokenCheckpointError, ValueError):  # unfinished, or not a checkpoint
            continue
    return sorted(found, key=lambda one: one.step)


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


def read_folder(folder: Path) -> State:
    """Return the state that several ranks have written to a folder. The files must already be
    verified."""
    paths = folder.glob("*.safetensors")
    found = {path.name: _opened(path.as_uri(), path.stat().st_size) for path in paths}
    return _divided_tree(json.loads((folder / TREE).read_bytes()), found)


def load_each(
    refs: Sequence[CheckpointRef],
    *,
    number: int = 0,
    num_ranks: int = 1,
    read: Callable[..., LoadedCheckpoint] = load,
) -> Iterator[LoadedCheckpoint | SkippedCheckpoint]:
    """Load each of `refs` in order, and yield the checkpoint, or the reason why it can't be loaded.
    number, num_ranks: see `load`. read: a function that is called like `load`."""
    for ref in refs:
        try:
            yield read(ref, number=number, num_ranks=num_ranks)
        except BrokenCheckpointError as error:
            is_reached = not isinstance(error, UnreachableCheckpointError)
            yield SkippedCheckpoint(ref.step, str(error), is_reached)


def _verified(url: str, entry: Mapping[str, Any]) -> Path | bytes:
    """Return the path of a checkpoint's file, or the file's content if the storage is not a file
    system."""
    name = f"{url}/{entry['path']}"
    path = local_path(name)
    if path is not None:
        _check(name, entry, direct_io.measure)
        return path
    content = read_file(name)
    _check(name, entry, lambda _: (len(content), hashlib.sha256(content).hexdigest()))
    return content


def _check(name: str, entry: Mapping[str, Any], measure: Callable[[str], tuple[int, str]]) -> None:
    try:
        num_bytes, sha256 = measure(name)
    except OSError as error:
        raise unreadable(name, error) from error
    if num_bytes != entry["size_bytes"]:
        raise BrokenCheckpointError(
            f"{name} has {num_bytes} bytes instead of {entry['size_bytes']}"
        )
    if sha256 != entry["sha256"]:
        raise BrokenCheckpointError(f"{name} does not match its hash")


def _bytes_of(part: Path | bytes) -> bytes:
    return part.read_bytes() if isinstance(part, Path) else part
