"""Records of a node's processes, used to find processes that outlive their parents.

When a forkserver is killed, its ranks die with it, but the processes that the ranks have started
don't. When all of dray's processes on a node die, none of them is left to kill the processes that
the ranks have started. Therefore each forked session has a small file in the node's folder, and the
node itself has a file that names its raylet.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ray_workers.shared.paths import entries
from ray_workers.shared.processes.procfs import (
    Session,
    boot_id,
    command,
    pid_namespace,
    started_ticks,
)

SESSIONS = "sessions"
OWNER = "owner.json"


@dataclass(frozen=True)
class SessionRecord:
    """The record of a session, with its rank and the forkserver that forked it."""

    place: str
    boot_id: str
    server_pid: int
    server_started: int
    pid: int
    started: int
    mark: str
    job_id: str
    attempt: int
    rank: int
    gpus: str = ""
    """The rank's CUDA_VISIBLE_DEVICES."""
    shares_gpus: bool = False
    """Whether other jobs can also have memory on these GPUs."""

    @property
    def is_of_this_pid_namespace(self) -> bool:
        """Whether the record's pids are valid on this host and in this container."""
        return self.place == pid_namespace()

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()

    @property
    def has_parent(self) -> bool:
        """Whether the session's forkserver is alive."""
        return self.is_of_this_boot and started_ticks(self.server_pid) == self.server_started

    @property
    def gpu_names(self) -> list[str]:
        return [name for name in self.gpus.split(",") if name]

    def session(self) -> Session:
        """Return the session to search for when its forkserver is dead. The session's number is
        used only while its leader is alive, since another session can get the same number
        afterwards."""
        return Session(self.pid, self.started, self.mark, started_ticks(self.pid) != self.started)


def sessions_dir(runtime_dir: Path) -> Path:
    return runtime_dir / SESSIONS


def _folder(directory: Path, job_id: str, attempt: int) -> Path:
    return directory / (job_id or "-") / str(attempt)


def write_session(directory: Path, record: SessionRecord) -> None:
    folder = _folder(directory, record.job_id, record.attempt)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = folder / f"{record.mark}.new"
    draft.write_text(json.dumps(asdict(record)))
    draft.replace(draft.with_suffix(".json"))


def read_sessions(directory: Path) -> list[SessionRecord]:
    """Return the records of a node. Records that are incomplete or have just been removed are
    skipped."""
    return _read(sorted(_files(directory)))


def sessions_of(directory: Path, job_id: str, attempt: int) -> list[SessionRecord]:
    """Return the records of an attempt, oldest process first."""
    paths = [p for p in entries(_folder(directory, job_id, attempt)) if p.suffix == ".json"]
    return sorted(_read(paths), key=lambda record: record.started)


def _read(paths: Iterable[Path]) -> list[SessionRecord]:
    found = []
    for path in paths:
        try:
            found.append(SessionRecord(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return found


def _files(directory: Path) -> Iterator[Path]:
    for job in entries(directory):
        for attempt in entries(job):
            yield from (path for path in entries(attempt) if path.suffix == ".json")


def remove_session(directory: Path, record: SessionRecord) -> None:
    folder = _folder(directory, record.job_id, record.attempt)
    (folder / f"{record.mark}.json").unlink(missing_ok=True)
    for emptied in (folder, folder.parent):
        with contextlib.suppress(OSError):  # not empty
            emptied.rmdir()


def write_owner(runtime_dir: Path, raylet: int) -> None:
    """Record this node's raylet, if the process is a raylet."""
    raylet = raylet if command(raylet) == "raylet" else 0
    owner = {
        "place": pid_namespace(),
        "boot_id": boot_id(),
        "raylet": raylet,
        "started": started_ticks(raylet),
    }
    draft = runtime_dir / f"{OWNER}.new"
    draft.write_text(json.dumps(owner))
    draft.replace(runtime_dir / OWNER)


def is_dead_node(runtime_dir: Path) -> bool:
    """Whether the node with this folder is certainly dead; False if the node has no record."""
    try:
        owner = json.loads((runtime_dir / OWNER).read_text())
        boot, raylet, started = owner["boot_id"], owner["raylet"], owner["started"]
        if owner["place"] != pid_namespace():
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if boot != boot_id():
        return True
    return bool(raylet) and started_ticks(raylet) != started


def dead_nodes(deployment_root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of other nodes that were on this machine and are certainly dead."""
    return (n for n in nodes_of(deployment_root) if n != own and is_dead_node(n))


def nodes_of(deployment_root: Path) -> Iterator[Path]:
    """Yield the folders of the deployment's nodes on this machine, dead or alive."""
    return (path for path in entries(deployment_root) if path.is_dir())
