"""Reports of a training process, sent through its spool: metrics, artifacts and checkpoints."""

from __future__ import annotations

import atexit
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, SupportsIndex

from dray.train import files, saved_files, spool
from dray.train.call_lock import CallLock
from dray.train.checkpoints import (
    Checkpoint,
    CheckpointRef,
    SavedCheckpoint,
    ScriptCheckpoints,
    files_of,
)
from dray.train.spool import EVERYTHING, Known, SpoolWriter
from dray.train.storage_faults import StorageError, log, wait_for_space

DEFAULT_SPOOL_LIMIT_BYTES = 64 << 20
STREAM_LIMIT_BYTES = 32 << 20
"""Maximum size of a separate stream on the node that the service has not received yet."""
MAX_KEY_CHARS = 128
MAX_KEYS = 1024
MAX_STEP = 2**53
"""Not all JSON readers represent larger integers exactly."""
RESERVED_KEY = "@time"
"""Name of the series in which the service stores times."""

_ARTIFACT_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Context:
    """The job and rank of this process. Without dray and torchrun, the rank is 0 of 1."""

    job_id: str | None
    """Id of the job; None outside of dray."""
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    """Index of this process among the job's processes on its node. `LOCAL_RANK` is the index of
    the GPU to use, which is 0 where each process sees only its own GPU."""
    artifact_url: str | None
    """The folder to which `save_artifact` copies files."""
    checkpoint_url: str | None
    """Folder for the checkpoints of this attempt only."""
    resume_url: str | None
    """The newest checkpoint of an earlier attempt, if any. `load_checkpoint` loads this checkpoint
    or, if it is damaged, an older one."""


@dataclass(frozen=True)
class SavedArtifact:
    path: str
    """Path of the artifact relative to the artifact URL. The API lists the artifact under this
    name."""
    url: str
    size_bytes: int
    sha256: str


def context() -> Context:
    """Read the job and rank from the environment that dray or torchrun has set."""
    env = os.environ
    return Context(
        job_id=env.get("DRAY_JOB_ID"),
        attempt=int(env.get("DRAY_ATTEMPT", "0")),
        rank=int(env.get("RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_rank=int(env.get("DRAY_LOCAL_RANK") or env.get("LOCAL_RANK", "0")),
        artifact_url=env.get("DRAY_ARTIFACT_URL"),
        checkpoint_url=env.get("DRAY_CHECKPOINT_URL"),
        resume_url=env.get("DRAY_RESUME_URL"),
    )


def report(
    step: SupportsIndex,
    values: Mapping[str, SupportsFloat],
    *,
    epoch: int | None = None,
    total_steps: int | None = None,
    samples_per_s: float | None = None,
) -> None:
    """Like `dray.train.report`, but the step must be given."""
    number = checked_count("step", step)
    if len(values) > MAX_KEYS:
        raise ValueError(
            f"report() was given {len(values)} keys, but a step must not have more than {MAX_KEYS}"
        )
    body: dict[str, Any] = {
        "step": number,
        "values": {checked_key(key): _checked_number(key, value) for key, value in values.items()},
    }
    if epoch is not None:
        body["epoch"] = checked_count("epoch", epoch)
    if total_steps is not None:
        body["total_steps"] = checked_count("total_steps", total_steps)
    if samples_per_s is not None:
        body["samples_per_s"] = _checked_number("samples_per_s", samples_per_s)
    emit("metrics", body)
    if _observer is not None:
        _observer.stepped(number)


def save_artifact(path: str | os.PathLike[str], name: str | None = None) -> SavedArtifact:
    """Save a file as a result of the job, under `name` (by default the file's own name).

    Saving a name again replaces the artifact, whichever rank saved it before, so use different
    names on different ranks. Raises FileNotFoundError if `path` is not a file. Raises ValueError if
    the name is not a relative path of letters, digits, `.`, `_` and `-`, or if the artifacts of
    this rank exceed the operator's limit on their total size. If the storage is full or does not
    respond, the call waits for up to ten minutes and then raises StorageError, which counts as a
    fault of the cluster. Outside of dray, the file stays in place, and the returned URL is the URL
    of the original file."""
    saved: list[SavedArtifact] = []
    what = f"the artifact {Path(path).name if name is None else name}"
    with _storing():
        wait_for_space(what, lambda: saved.append(store_artifact(path, name)))
    return saved[0]


def store_artifact(path: str | os.PathLike[str], name: str | None = None) -> SavedArtifact:
    """Like `save_artifact`, for dray's own loop: raises StorageError without waiting."""
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"save_artifact() found no file at {source.absolute()}")
    target = source.name if name is None else name
    if not all(_ARTIFACT_PART.fullmatch(part) for part in target.split("/")):
        raise ValueError(
            f"artifact name {target!r} must be a relative path whose parts start with a letter, "
            "digit or _ and contain only letters, digits, ., _ and -"
        )
    base = os.environ.get("DRAY_ARTIFACT_URL")
    if base is None:
        size, sha256 = files.measure(source)
        return SavedArtifact(target, source.absolute().as_uri(), size, sha256)
    before = source.stat()
    _check_size(target, before.st_size)
    url = f"{base.rstrip('/')}/{target}"
    size, sha256 = files.store(source, url)
    _saved_bytes[target] = size
    body = {"path": target, "url": url, "size_bytes": size, "sha256": sha256}
    if math.isinf(append("artifact", body)) or not _is_written():
        raise StorageError(f"this node's disk has no space for the report of artifact {target}")
    saved_files.note(saved_files.version_of(before))
    return SavedArtifact(target, url, size, sha256)


def _check_size(target: str, size: int) -> None:
    """Raise ValueError if the artifacts of this process would be too large in total. A file's
    full length is counted, because the storage receives the holes of a sparse file as zeros."""
    limit = int(os.environ.get("DRAY_OUTPUT_LIMIT_BYTES", 0))
    others = sum(saved for name, saved in _saved_bytes.items() if name != target)
    if limit and others + size > limit:
        before = f" in addition to {others:,} bytes of other artifacts" if others else ""
        raise ValueError(
            f"the artifact {target} has {size:,} bytes{before}; the total size of a rank's "
            f"artifacts is limited to {limit:,} bytes (DRAY_OUTPUT_LIMIT_BYTES)"
        )


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: SupportsIndex,
    metrics: Mapping[str, SupportsFloat] | None = None,
    *,
    keep: int = 2,
) -> SavedCheckpoint | None:
    """Copy the files of a folder to a new checkpoint of the job. The job's next attempt can load
    the checkpoint with `load_checkpoint`.

    Call this on one rank, after all processes have finished writing to the folder. The call returns
    after the checkpoint has been written, hashed and committed. The `keep` newest checkpoints of
    all attempts are kept. Until the service has received the reports of these checkpoints, the
    `keep` newest checkpoints that it knows of are also kept.

    step: number of optimizer steps done; a step that this process has already saved is not saved
    again. metrics: metrics of this step, which are listed with the checkpoint.

    If the storage fails, returns None and logs a line, so that training can continue. Raises
    ValueError for a folder without files. Outside of dray, the files stay in place, and the
    returned URL refers to this folder."""
    number = checked_count("step", step)
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    source = Path(folder)
    values = {checked_key(k): _checked_number(k, v) for k, v in (metrics or {}).items()}
    found = files_of(source)
    base = os.environ.get("DRAY_CHECKPOINT_URL")
    if base is None:
        size = sum(path.stat().st_size for path in found)
        return SavedCheckpoint(number, source.absolute().as_uri(), size)
    with _storing():
        return _checkpoints_of_the_job().save(source, base, number, values, keep)


def replicas_agreed(step: int) -> None:
    """Record that all replicas were equal after this step, so that the newest checkpoint up to this
    step is kept."""
    _checkpoints_of_the_job().checked_step = step


def load_checkpoint() -> Checkpoint | None:
    """Return the newest intact checkpoint of the job's earlier attempts, or None.

    Each rank can call this before its first step; rank 0's call is also reported to the service. A
    checkpoint whose files differ from the committed files is skipped, and the previous checkpoint
    is used. Raises StorageError if the storage can't be reached, because a later attempt may be
    able to reach it.
    """
    with _storing():
        return _checkpoints_of_the_job().load(leaves_receipt=context().rank == 0)


class Observer(Protocol):
    """Measures how a script spends its time. The observer's methods are called in the script's
    thread."""

    def stepped(self, step: int) -> None:
        """Called when the script has reported this step."""

    def storing(self) -> AbstractContextManager[None]:
        """Return a context in which the script saves or loads files of the job."""


def observe(observer: Observer) -> None:
    """Set the observer; dray calls this before it runs a script in this process."""
    global _observer
    _observer = observer


def _storing() -> AbstractContextManager[None]:
    return nullcontext() if _observer is None else _observer.storing()


NOT_VITAL = frozenset({"metrics", "media", "packages"})
"""Kinds of frames that are dropped if the disk has no space."""


def emit(kind: str, body: Mapping[str, Any]) -> bool:
    """Append one frame to this process's spool. Returns False if the frame was dropped, or if there
    is no spool.

    This is for dray's own loop; scripts use `report` and `save_artifact`.
    """
    return 0 < append(kind, body) < math.inf


def append(kind: str, body: Mapping[str, Any], *, stream: str = "") -> float:
    """Like `emit`, but return the offset of the frame's end in the spool (see `known`): infinity if
    the frame was dropped, 0 if there is no spool.

    stream: suffix of a separate spool; empty for the spool of reports."""
    directory = os.environ.get("DRAY_SPOOL_DIR")
    if directory is None:
        return 0.0
    with _lock:
        writer = _writer(directory, stream)
        if not writer.append(kind, body, vital=kind not in NOT_VITAL):
            return math.inf
        position, num_missing = writer.position, writer.take_num_dropped()
    if not stream:  # the callers for other streams count what is missing themselves
        _log_missing(num_missing)
    return position


def wait_until_written(waiting: Callable[[], None]) -> None:
    """Wait until all reports of this process are on its node's disk. Raises StorageError if the
    disk has no space for the reports within `storage_faults.WAIT_S` seconds.

    waiting: called before each pause. dray calls this function at the end of a rank.
    """

    def write() -> None:
        if not _is_written():
            raise StorageError("this node's disk has no space for the reports")

    wait_for_space("the rank's last report", write, waiting=waiting)


def _is_written() -> bool:
    """Whether all reports of this process are on its node's disk."""
    with _lock:
        written = [writer.flush() for _, _, writer in _open_writers.values()]
    return all(written)


def known() -> Known:
    """Return the number of bytes of this process's reports that the service has stored, and the
    number of bytes that were sent to the service."""
    directory = os.environ.get("DRAY_SPOOL_DIR")
    return EVERYTHING if directory is None else spool.known(Path(directory))


_observer: Observer | None = None
_saved_bytes: dict[str, int] = {}
"""Sizes in bytes of the artifacts that this process has saved, keyed by name."""
_lock = CallLock()
_open_writers: dict[str, tuple[int, str, SpoolWriter]] = {}
"""The process, the folder and the writer of each stream."""
_known_keys: set[str] = set()
_job_checkpoints: ScriptCheckpoints | None = None
"""Set once this process has saved or loaded a checkpoint."""


def _checkpoints_of_the_job() -> ScriptCheckpoints:
    global _job_checkpoints
    if _job_checkpoints is None:
        refs = json.loads(os.environ.get("DRAY_RESUME_FROM", "[]"))
        earlier = [CheckpointRef(**ref) for ref in reversed(refs)]
        _job_checkpoints = ScriptCheckpoints(earlier, append, known)
        # The order of exit handlers doesn't matter: frames that are appended after the writer is
        # closed are still written.
        atexit.register(_tidy, os.getpid(), _job_checkpoints)
    return _job_checkpoints


def _tidy(pid: int, checkpoints: ScriptCheckpoints) -> None:
    """Delete superseded checkpoints when a process that saved checkpoints ends. A forked child
    process inherits this exit handler, but must not tidy up."""
    if os.getpid() != pid:
        return
    with _storing():
        checkpoints.tidy()


def _writer(directory: str, stream: str) -> SpoolWriter:
    """Return the writer of this process. A spool has only one writer. A child process inherits the
    environment, but its writes would corrupt the file, so this function raises RuntimeError in a
    child process."""
    pid = os.getpid()
    opened = _open_writers.get(stream)
    if opened is not None and opened[:2] == (pid, directory):
        return opened[2]
    owner = os.environ.get("DRAY_SPOOL_PID")
    if owner is not None and owner != str(pid):
        raise RuntimeError(
            f"dray.train was called in process {pid}, a child of the training process {owner}; "
            "return the values to the training process and report them there"
        )
    limit = int(os.environ.get("DRAY_SPOOL_LIMIT_BYTES", DEFAULT_SPOOL_LIMIT_BYTES))
    folder = Path(directory)
    if stream:
        folder, limit = folder.with_suffix(stream), min(limit, STREAM_LIMIT_BYTES)
    if opened is not None and opened[0] == pid:
        opened[2].close()
    writer = SpoolWriter(folder, limit_bytes=limit)
    atexit.register(_close, pid, writer)
    _open_writers[stream] = (pid, directory, writer)
    return writer


def _close(pid: int, writer: SpoolWriter) -> None:
    """Close a spool at the end of the process that opened it. A forked child process inherits this
    exit handler, but must not close the spool."""
    if os.getpid() != pid:
        return
    with _lock:
        writer.close()
        num_missing = writer.take_num_dropped() + writer.num_waiting
    _log_missing(num_missing)


def _log_missing(number: int) -> None:
    """Log the number of reports dropped since the last such message, unless it is 0."""
    if number:
        are = "1 report is" if number == 1 else f"{number} reports are"
        log(
            f"{are} missing here, because the node of rank {context().rank} had no "
            "space for more reports"
        )


def checked_key(key: str) -> str:
    """Return the key. Raises ValueError if it is not a valid name of a metric."""
    if key in _known_keys:
        return key
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise ValueError(
            f"metric key {key!r} must be a string of 1 to {MAX_KEY_CHARS} printable characters, "
            "such as train/loss"
        )
    if key == RESERVED_KEY:
        raise ValueError(f"metric key {key!r} is reserved for dray")
    if len(_known_keys) < MAX_KEYS:
        _known_keys.add(key)
    return key


def checked_count(name: str, value: SupportsIndex) -> int:
    """Return the number. Raises TypeError or ValueError if it is not an integer from 0 to 2**53."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}, but must be an integer") from error
    if not 0 <= number <= MAX_STEP:
        raise ValueError(f"{name} is {number}, but must be from 0 to 2**53")
    return number


def _checked_number(key: str, value: SupportsFloat) -> float:
    if isinstance(value, str | bytes):
        raise ValueError(f"metric {key} is the string {value!r}, but must be a number")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"metric {key} is not a single real number: {error}") from error
