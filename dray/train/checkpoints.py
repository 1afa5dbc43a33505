"""Checkpoints of a user's own script, and what is the same of a recipe's.

`{checkpoint URL}/step-{step:012d}/` holds the files of a folder under their own names, and
`manifest.json`, which has their hashes and is written last: it commits the checkpoint, and its own
hash is told to the service. The recipes' lie in the same place and look the same from outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.names import unfit
from dray.train import files
from dray.train.spool import Known
from dray.train.storage_room import StorageError

MANIFEST = "manifest.json"
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
"""What reading a document raises that is not what it should be."""
KNOWN_WITHIN_S = 3.0
"""What a service that is there takes to store what it is told, and more."""
MAX_TOLD = 100
MAX_WHY_CHARS = 1000

Tell = Callable[[str, Mapping[str, Any]], float]
"""Leaves a frame on the spool; up to where it lies there, infinite if it found no room."""


class BrokenCheckpoint(Exception):
    """It is not there, or not as it was committed."""


@dataclass(frozen=True)
class CheckpointRef:
    """A committed checkpoint: where it lies and how far it had come."""

    url: str
    step: int
    manifest_sha256: str


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    url: str
    """Of the folder with its files."""
    size_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """What an earlier attempt of the job saved last."""

    step: int
    path: Path
    """A folder with the files as they were saved, for reading only."""


# Which stay.


def staying(
    in_order: Sequence[str], *, keep: int, told: Mapping[str, float], known: Known
) -> set[str]:
    """URLs of the `keep` newest checkpoints, and of the `keep` newest that the service knows of and
    that it may know of: if the node is lost before it tells of the others, nobody would find them.

    in_order: URLs, the newest last. told: up to where on the spool the word of each lies; of what
    is not in it the service knows.
    """
    kept = set(in_order[-keep:])
    for limit in known:
        kept.update([url for url in in_order if told.get(url, 0.0) <= limit][-keep:])
    return kept


def await_known(told: Collection[float], known: Callable[[], Known]) -> None:
    """Return when the service has stored what was told, or if that takes long."""
    deadline = time.monotonic() + KNOWN_WITHIN_S
    while known().stored < max(told, default=0.0) and time.monotonic() < deadline:
        time.sleep(0.02)


# A script's.


class ScriptCheckpoints:
    """Those of one job, as one of its processes sees them."""

    def __init__(
        self, earlier: Sequence[CheckpointRef], tell: Tell, known: Callable[[], Known]
    ) -> None:
        """earlier: of the attempts before, the newest last."""
        self._earlier = earlier
        self._tell = tell
        self._known = known
        self._kept = list(earlier)
        """In the order in which they were saved."""
        self._told: dict[str, float] = {}
        self._saved: dict[int, SavedCheckpoint] = {}
        self._keep = 1
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        """For files of a checkpoint that lie far away; gone when the process ends."""

    def save(
        self, folder: Path, base_url: str, step: int, metrics: Mapping[str, float], keep: int
    ) -> SavedCheckpoint | None:
        """None, and a line in the log, if the storage could not take it."""
        if step in self._saved:
            return self._saved[step]
        try:
            ref, size = commit(folder, base_url, step, metrics)
        except Exception as error:  # whatever a storage may raise
            _log(f"the checkpoint of step {step} could not be saved: {error}. Training goes on")
            return None
        told = {"step": step, "url": ref.url, "size_bytes": size, "metrics": dict(metrics)}
        told["manifest_sha256"] = ref.manifest_sha256
        self._told[ref.url] = self._tell("checkpoint", told)
        self._saved[step] = SavedCheckpoint(step, ref.url, size)
        self._kept.append(ref)
        self._keep = keep
        self._drop_superseded()
        return self._saved[step]

    def load(self, *, leaves_receipt: bool) -> Checkpoint | None:
        """The newest of the earlier attempts' that is whole. StorageError if the storage can't be
        reached."""
        self._kept = []  # what is passed over counts no more, so that it makes nothing newer go
        passed_over = []
        receipt: dict[str, Any] = {"step": 0, "url": ""}
        found: Checkpoint | None = None
        for at, ref in reversed(list(enumerate(self._earlier))):
            try:
                found = Checkpoint(ref.step, fetch(ref, self._folder_for(ref)))
            except BrokenCheckpoint as error:
                _log(f"passing over the checkpoint of step {ref.step}: {error}")
                passed_over.append({"step": ref.step, "why": str(error)[:MAX_WHY_CHARS]})
                continue
            self._kept = list(self._earlier[: at + 1])
            receipt = {"step": ref.step, "url": ref.url, "sha256": ref.manifest_sha256}
            break
        if leaves_receipt:
            self._tell("resumed", {**receipt, "passed_over": passed_over[:MAX_TOLD]})
        return found

    def tidy(self) -> None:
        """At the end of who saved: drop what is superseded, once the service knows the newest."""
        if self._saved:
            await_known(self._told.values(), self._known)
            self._drop_superseded()

    def _folder_for(self, ref: CheckpointRef) -> Path:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="dray-checkpoint-")
        return Path(self._scratch.name, f"step-{ref.step}")

    def _drop_superseded(self) -> None:
        in_order = [ref.url for ref in self._kept]
        kept = staying(in_order, keep=self._keep, told=self._told, known=self._known())
        for old in [ref for ref in self._kept if ref.url not in kept]:
            self._kept.remove(old)
            try:
                drop(old)
            except Exception as error:  # as above
                _log(f"the checkpoint of step {old.step} could not be deleted: {error}")
            else:
                self._tell("checkpoint_dropped", {"step": old.step, "url": old.url})


def commit(
    folder: Path, base_url: str, step: int, metrics: Mapping[str, float]
) -> tuple[CheckpointRef, int]:
    """Copy a folder's files and commit them; the checkpoint and its bytes.

    Whatever goes wrong leaves no checkpoint.
    """
    url = f"{base_url.rstrip('/')}/step-{step:012d}"
    try:
        return _commit(folder, url, step, metrics)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_folder(url)
        raise


def _commit(
    folder: Path, url: str, step: int, metrics: Mapping[str, float]
) -> tuple[CheckpointRef, int]:
    entries, total = [], 0
    for source in files_of(folder):
        path = source.relative_to(folder).as_posix()
        size, sha256 = files.store(source, f"{url}/{path}")
        entries.append({"path": path, "size_bytes": size, "sha256": sha256})
        total += size
    manifest = {"step": step, "metrics": dict(metrics), "files": entries}
    with tempfile.TemporaryDirectory(prefix="dray-manifest-") as draft:
        text = Path(draft, MANIFEST)
        text.write_text(json.dumps(manifest, indent=1))
        size, sha256 = files.store(text, f"{url}/{MANIFEST}")
    files.sync_names(url)
    return CheckpointRef(url, step, sha256), total + size


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder, in order. Raises ValueError where there is none to save, or one
    whose name no listing can show."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    if not found:
        raise ValueError(f"save_checkpoint() found no file in {folder.absolute()}")
    for path in found:
        if (character := unfit(str(path.relative_to(folder)))) is not None:
            raise ValueError(f"a file of a checkpoint has {character} in its name: {str(path)!r}")
    if folder / MANIFEST in found:
        raise ValueError(f"a file of a checkpoint can't be called {MANIFEST}: dray writes that")
    return found


def fetch(ref: CheckpointRef, scratch: Path) -> Path:
    """A folder with the checkpoint's files: where they lie, or copied into `scratch`.

    Raises BrokenCheckpoint if any of them is not what was committed, StorageError if the storage
    can't be reached.
    """
    local = files.local_path(ref.url)
    try:
        text = files.read(f"{ref.url}/{MANIFEST}")
        if hashlib.sha256(text).hexdigest() != ref.manifest_sha256:
            raise BrokenCheckpoint("its manifest is not the one that was committed")
        for entry in json.loads(text)["files"]:
            _check(entry, ref.url, scratch, local)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BrokenCheckpoint(f"a file of it is missing: {error}") from error
    except OSError as error:
        raise StorageError(f"the checkpoint {ref.url} can't be read: {error}") from error
    except MALFORMED as error:
        raise BrokenCheckpoint(f"its manifest names no files: {error!r}") from error
    return local or scratch


def _check(entry: Mapping[str, Any], url: str, scratch: Path, local: Path | None) -> None:
    path = entry["path"]
    if local is None:
        found = files.fetch(f"{url}/{path}", scratch / path)
    else:
        found = files.measure(local / path)
    if found != (entry["size_bytes"], entry["sha256"]):
        raise BrokenCheckpoint(f"its file {path} is not as it was committed")


def drop(ref: CheckpointRef) -> None:
    """Delete it, its manifest first: what is half deleted is then no checkpoint."""
    files.remove_file(f"{ref.url}/{MANIFEST}")
    files.remove_folder(ref.url)


def _log(sentence: str) -> None:
    """A line in the job's log, which is what standard output is."""
    sys.stdout.write(f"dray: {sentence}\n")
    sys.stdout.flush()
