"""Checkpoints of users' scripts, and functions that are also used by recipes.

`{checkpoint URL}/step-{step:012d}/` contains the files of a folder under their own names, and
`manifest.json` with their hashes. The manifest is written last and commits the checkpoint; the hash
of the manifest is reported to the service. Checkpoints of recipes have the same layout.
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

from dray.input.names import unfit
from dray.train import files
from dray.train.spool import Known
from dray.train.storage_faults import StorageError

MANIFEST = "manifest.json"
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
"""Exceptions raised while reading a malformed document."""
KNOWN_WITHIN_S = 3.0
"""Maximum number of seconds to wait until the service has stored the reports. A running service
needs less time."""
MAX_PASSED_OVER = 100
MAX_WHY_CHARS = 1000

Report = Callable[[str, Mapping[str, Any]], float]
"""Appends a frame to the spool; returns the offset of the frame's end, or infinity if the frame was
dropped."""


class BrokenCheckpoint(Exception):
    """The checkpoint is missing, or differs from the committed checkpoint."""


@dataclass(frozen=True)
class CheckpointRef:
    """A committed checkpoint."""

    url: str
    step: int
    manifest_sha256: str


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    url: str
    """URL of the folder with the files."""
    size_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """The newest intact checkpoint of an earlier attempt of the job."""

    step: int
    path: Path
    """Folder with the files as they were saved. Do not modify its contents."""


# Retention.


def staying(
    steps: Mapping[str, int],
    *,
    keep: int,
    reported: Mapping[str, float],
    known: Known,
    checked_step: int | None = None,
) -> set[str]:
    """Return the URLs of the checkpoints to keep: the `keep` newest, the `keep` newest whose
    reports the service has stored, the `keep` newest whose reports were sent to the service, and
    the newest checkpoint up to `checked_step`. If the node is lost before it has sent all reports,
    the job can resume only from checkpoints whose reports have arrived.

    steps: the step of each URL, oldest first. reported: offset in the spool at which each
    checkpoint's report ends. The service has stored the report of every checkpoint that is not
    listed. known: number of bytes of the spool that the service has stored, and number of bytes
    that were sent to the service. checked_step: last step after which the replicas were equal, if
    they are compared.
    """
    in_order = list(steps)
    kept = set(in_order[-keep:])
    if checked_step is not None:
        kept.update([url for url, step in steps.items() if step <= checked_step][-1:])
    for limit in known:
        kept.update([url for url in in_order if reported.get(url, 0.0) <= limit][-keep:])
    return kept


def await_known(report_ends: Collection[float], known: Callable[[], Known]) -> None:
    """Wait up to KNOWN_WITHIN_S seconds until the service has stored the reports that end at these
    offsets in the spool."""
    deadline = time.monotonic() + KNOWN_WITHIN_S
    while known().stored < max(report_ends, default=0.0) and time.monotonic() < deadline:
        time.sleep(0.02)


# Checkpoints of scripts.


class ScriptCheckpoints:
    """The checkpoints of one job, as one of its processes sees them."""

    def __init__(
        self, earlier: Sequence[CheckpointRef], report: Report, known: Callable[[], Known]
    ) -> None:
        """earlier: checkpoints of earlier attempts, oldest first."""
        self._earlier = earlier
        self._report = report
        self._known = known
        self._kept = list(earlier)
        """Checkpoints in the order in which they were saved."""
        self._report_ends: dict[str, float] = {}
        self._saved: dict[int, SavedCheckpoint] = {}
        self._keep = 1
        self.checked_step: int | None = None
        """Last step after which the replicas of the model are known to have been equal."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        """Local copies of the files of remote checkpoints, deleted when the process ends."""

    def save(
        self, folder: Path, base_url: str, step: int, metrics: Mapping[str, float], keep: int
    ) -> SavedCheckpoint | None:
        """Save a checkpoint. If the storage fails, log a line and return None."""
        if step in self._saved:
            return self._saved[step]
        try:
            ref, size = commit(folder, base_url, step, metrics)
        except Exception as error:  # storage clients raise many types
            _log(f"the checkpoint of step {step} could not be saved: {error}. Training continues")
            return None
        body = {"step": step, "url": ref.url, "size_bytes": size, "metrics": dict(metrics)}
        body["manifest_sha256"] = ref.manifest_sha256
        self._report_ends[ref.url] = self._report("checkpoint", body)
        self._saved[step] = SavedCheckpoint(step, ref.url, size)
        self._kept.append(ref)
        self._keep = keep
        self._drop_superseded()
        return self._saved[step]

    def load(self, *, leaves_receipt: bool) -> Checkpoint | None:
        """Return the newest intact checkpoint of the earlier attempts, or None. Raises StorageError
        if the storage can't be reached."""
        self._kept = []  # damaged checkpoints must not supersede others
        passed_over = []
        receipt: dict[str, Any] = {"step": 0, "url": ""}
        found: Checkpoint | None = None
        for at, ref in reversed(list(enumerate(self._earlier))):
            try:
                found = Checkpoint(ref.step, fetch(ref, self._folder_for(ref)))
            except BrokenCheckpoint as error:
                _log(f"skipping the checkpoint of step {ref.step}: {error}")
                passed_over.append({"step": ref.step, "why": str(error)[:MAX_WHY_CHARS]})
                continue
            self._kept = list(self._earlier[: at + 1])
            receipt = {"step": ref.step, "url": ref.url, "sha256": ref.manifest_sha256}
            break
        if leaves_receipt:
            self._report("resumed", {**receipt, "passed_over": passed_over[:MAX_PASSED_OVER]})
        return found

    def tidy(self) -> None:
        """Delete superseded checkpoints once the service has stored the reports of the newest
        checkpoints. Called at the end of a process that has saved checkpoints."""
        if self._saved and len(self._kept) > self._keep:
            await_known(self._report_ends.values(), self._known)
            self._drop_superseded()

    def _folder_for(self, ref: CheckpointRef) -> Path:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="dray-checkpoint-")
        return Path(self._scratch.name, f"step-{ref.step}")

    def _drop_superseded(self) -> None:
        kept = staying(
            {ref.url: ref.step for ref in self._kept},
            keep=self._keep,
            reported=self._report_ends,
            known=self._known(),
            checked_step=self.checked_step,
        )
        for old in [ref for ref in self._kept if ref.url not in kept]:
            self._kept.remove(old)
            try:
                drop(old)
            except Exception as error:  # storage clients raise many types
                _log(f"the checkpoint of step {old.step} could not be deleted: {error}")
            else:
                self._report("checkpoint_dropped", {"step": old.step, "url": old.url})


def commit(
    folder: Path, base_url: str, step: int, metrics: Mapping[str, float]
) -> tuple[CheckpointRef, int]:
    """Copy a folder's files and commit them; returns the checkpoint and its size in bytes.

    If an error occurs, no checkpoint is left.
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
    """Return the paths of all files in a folder and its subfolders, sorted. Raises ValueError if
    the folder contains no file, or a file whose name is not allowed."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    if not found:
        raise ValueError(f"save_checkpoint() found no file in {folder.absolute()}")
    for path in found:
        if (character := unfit(str(path.relative_to(folder)))) is not None:
            raise ValueError(
                f"the name of a checkpoint file must not contain {character}: {str(path)!r}"
            )
    if folder / MANIFEST in found:
        raise ValueError(
            f"a checkpoint file must not be called {MANIFEST}: dray writes a file with this name"
        )
    return found


def fetch(ref: CheckpointRef, scratch: Path) -> Path:
    """Return a local folder with the checkpoint's files, copied into `scratch` if they are remote.

    Raises BrokenCheckpoint if a file differs from the committed file, and StorageError if the
    storage can't be reached.
    """
    local = files.local_path(ref.url)
    try:
        text = files.read(f"{ref.url}/{MANIFEST}")
        if hashlib.sha256(text).hexdigest() != ref.manifest_sha256:
            raise BrokenCheckpoint("its manifest differs from the committed manifest")
        for entry in json.loads(text)["files"]:
            _check(entry, ref.url, scratch, local)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BrokenCheckpoint(f"a file is missing: {error}") from error
    except OSError as error:
        raise StorageError(f"the checkpoint {ref.url} can't be read: {error}") from error
    except MALFORMED as error:
        raise BrokenCheckpoint(f"its manifest is malformed: {error!r}") from error
    return local or scratch


def _check(entry: Mapping[str, Any], url: str, scratch: Path, local: Path | None) -> None:
    path = entry["path"]
    if local is None:
        found = files.fetch(f"{url}/{path}", scratch / path)
    else:
        found = files.measure(local / path)
    if found != (entry["size_bytes"], entry["sha256"]):
        raise BrokenCheckpoint(f"its file {path} differs from the committed file")


def drop(ref: CheckpointRef) -> None:
    """Delete a checkpoint, starting with its manifest, so that an interrupted deletion leaves no
    checkpoint."""
    files.remove_file(f"{ref.url}/{MANIFEST}")
    files.remove_folder(ref.url)


def _log(sentence: str) -> None:
    """Write a line to the job's log (standard output)."""
    sys.stdout.write(f"dray: {sentence}\n")
    sys.stdout.flush()
