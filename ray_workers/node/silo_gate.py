"""The gate of a federated silo. The gate decides which data from the silo's ranks is allowed to
leave their node.

A rank whose data must stay on its node writes its reports like any other rank. The node agent,
through which all reports leave the node, forwards only the kinds of data that the node's owner has
opened, and the metrics that both the job and the owner list. The agent recognises a silo by a file
next to the spools, so that the protection doesn't depend on the rank's code. The owner decides
through environment variables of the node's Ray; a job can't change the decision.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ray_workers.shared.contracts import Cause, FrameKind, RankTask
from ray_workers.shared.paths import entries
from ray_workers.shared.spool_reader import parse_key

OPENS: Final = "DRAY_SILO_OPENS"
METRICS: Final = "DRAY_SILO_METRICS"
SOURCE: Final = "DRAY_SILO_SOURCE"
FOR_SILOS_ALONE: Final = f"the node has a silo's data ({SOURCE}), and runs only ranks of silos"
OUTPUT: Final = "output.log"
"""File that receives the output of a silo's rank, and the errors that occurred when the rank was
started, unless the owner has opened the logs (`Opening.LOGS`)."""
_NOTE: Final = ".silo-"
"""Prefix of the file names of silo ranks; each file name ends in the rank's number."""
_AGGREGATOR: Final = 0
"""The rank of the aggregator, which belongs to no silo even if it runs on a silo's node."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Opening(StrEnum):
    """A kind of data that the owner of a silo's node can allow to leave the node."""

    LOGS = "logs"
    """The ranks' output, and the messages and tracebacks of their errors."""
    STACKS = "stacks"
    """Stacks of the ranks' threads, in reports of hangs."""
    FILES = "files"
    """Artifacts, media and checkpoints that the ranks save."""
    SYSTEM_METRICS = "system_metrics"
    """The ranks' use of CPU and memory."""


OPENED_BY: Final = {
    FrameKind.LOG: Opening.LOGS,
    FrameKind.ERROR: Opening.LOGS,
    FrameKind.ARTIFACT: Opening.FILES,
    FrameKind.MEDIA: Opening.FILES,
    FrameKind.CHECKPOINT: Opening.FILES,
    FrameKind.CHECKPOINT_DROPPED: Opening.FILES,
}
"""The `Opening` that allows frames of each kind to leave the node unchanged. Frames of other kinds
are always reduced or removed."""


@dataclass(frozen=True)
class SiloRules:
    """A silo of an attempt on this node, and what the node's owner allows."""

    name: str
    opens: Set[Opening]
    metrics: Set[str]

    def frames(self, data: bytes) -> bytes:
        """Reduce complete lines of a spool to the content that is allowed to leave the node.
        Removed text is replaced by spaces, so that each line keeps its length, on which offsets in
        the spool depend."""
        return b"".join(self._line(line) for line in data.splitlines(keepends=True))

    def _line(self, line: bytes) -> bytes:
        nothing = b" " * (len(line) - 1) + b"\n"
        try:
            frame = json.loads(line)
            kind, body = FrameKind(frame["kind"]), frame["body"]
            if OPENED_BY.get(kind) in self.opens:
                return line
            kept = self._closed(kind, body)
            reduced = {"kind": kind, "time": _number(frame["time"]), "body": kept}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return nothing  # not a frame
        if kept is None:
            return nothing
        text = _encode(reduced).encode()
        return nothing if len(text) >= len(line) else text.ljust(len(line) - 1) + b"\n"

    def _closed(self, kind: FrameKind, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """For a frame of a kind that the owner has not opened, return the part that may leave the
        node, or None."""
        if kind is FrameKind.METRICS:
            values = {n: _number(v) for n, v in body["values"].items() if n in self.metrics}
            return {"step": _number(body["step"]), "values": values} if values else None
        return self._closed_error(body) if kind is FrameKind.ERROR else None

    def _closed_error(self, body: Mapping[str, Any]) -> dict[str, Any]:
        # Keep the result short, so that it fits into the line that it replaces.
        numbers = ("raised_at", "seat", "incarnation")
        return {
            "cause": Cause(body["cause"]),
            "type": "Silo",
            "message": f"error in silo {self.name}",
            "traceback": "",
            **{name: _number(body[name]) for name in numbers if body.get(name) is not None},
        }

    def stacks(self, text: str) -> str:
        if Opening.STACKS in self.opens:
            return text
        return f"the stacks of silo {self.name} are only available on the silo's node"


def _number(value: Any) -> float:
    """Return the value if it is a number; otherwise raise TypeError."""
    if type(value) not in (int, float):
        raise TypeError
    number: float = value
    return number


def owner_opens(environ: Mapping[str, str]) -> frozenset[Opening]:
    """Return the kinds of data that the node's owner has opened. Raises ValueError for an unknown
    kind."""
    words = (word.strip() for word in environ.get(OPENS, "").split(","))
    return frozenset(Opening(word) for word in words if word)


def owner_metrics(environ: Mapping[str, str], asked: Set[str]) -> frozenset[str]:
    """Return the metrics of a job that are allowed to leave the node: all metrics or, if the owner
    has set a list, only the metrics in the list."""
    if METRICS not in environ:
        return frozenset(asked)
    return frozenset(asked & {word.strip() for word in environ[METRICS].split(",")})


def has_source(environ: Mapping[str, str]) -> bool:
    """Whether the node's owner has specified a silo's data, so that the node only runs ranks of
    silos."""
    return bool(environ.get(SOURCE))


def silo_of(task: RankTask) -> Mapping[str, Any] | None:
    """Return the silo of this rank, as in the job document; None if the rank has no silo."""
    silos = (task.spec.get("federated") or {}).get("silos")
    if not silos or task.rank == _AGGREGATOR:
        return None
    found: Mapping[str, Any] = silos[task.rank - 1]
    return found


def folder_of(task: RankTask) -> Path:
    """Return the folder in which a silo's files are kept until its job is deleted."""
    return Path(task.work_dir, "silo", f"attempt-{task.attempt}", f"rank-{task.rank}")


def keep(task: RankTask, text: str) -> None:
    """Append to the silo's output, which remains on its node. Does nothing if there is no disk
    space."""
    folder = folder_of(task)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / OUTPUT).open("a") as file:
            file.write(text)


def restricted(task: RankTask, environ: Mapping[str, str]) -> RankTask:
    """Return a silo's task, restricted to what its node's owner allows. The silo's files stay on
    the node unless the owner has opened this kind of data (`Opening.FILES`). The silo gets no files
    of other jobs, and sends no metrics that must not leave the node."""
    metrics = owner_metrics(environ, set(task.spec["federated"]["metrics"]))
    federated = {**task.spec["federated"], "metrics": sorted(metrics)}
    own = environ.get(SOURCE)
    if own and task.silo_source not in (None, "", own):
        raise ValueError(
            f"{SOURCE} and the job document name different data: remove `source` from the document"
        )
    source = own or task.silo_source
    policy = task.data_policy
    if own:
        policy = replace(policy, file_roots=None)
    task = replace(
        task,
        spec={**task.spec, "federated": federated},
        silo_source=source,
        data_policy=policy,
        resume_from=(),
        init_from=None,
        older_than_init_from=(),
    )
    if Opening.FILES in owner_opens(environ):
        return task
    folder = folder_of(task)
    return replace(
        task,
        checkpoint_url=(folder / "checkpoints").as_uri(),
        artifact_url=(folder / "artifacts").as_uri(),
        folder_url=(folder / "checkpoint-folder").as_uri(),
    )


def note_silo(task: RankTask) -> None:
    """Record a silo that is about to start, for the node's agent."""
    silo = silo_of(task)
    if silo is None:
        return
    spools = Path(task.spool_dir).parent
    spools.mkdir(parents=True, exist_ok=True)
    partial = spools / f".{secrets.token_hex(8)}"
    partial.write_text(json.dumps([silo["name"], task.spec["federated"]["metrics"]]))
    partial.replace(spools / f"{_NOTE}{task.rank}")


class SiloGate:
    """The silos of attempts on this node, keyed by spool folder."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def silo(self, spools: Path, rank: int) -> SiloRules | None:
        """Return the rules for a rank; None if the rank is not a silo's rank, or has not started.
        Since a replacement can have a new rank number, every rank except the aggregator counts as a
        silo's rank if the attempt has a silo on the node."""
        notes = [path for path in entries(spools) if path.name.startswith(_NOTE)]
        if not notes or rank == _AGGREGATOR:
            return None
        own = spools / f"{_NOTE}{rank}"
        name, metrics = json.loads((own if own in notes else min(notes)).read_text())
        opens = owner_opens(self._environ)
        return SiloRules(name, opens, owner_metrics(self._environ, set(metrics)))

    def frames(self, spools: Path, key: str, data: bytes) -> bytes:
        """Reduce a spool's data to the content that is allowed to leave the node."""
        silo = self.silo(spools, parse_key(key)[0])
        return data if silo is None else silo.frames(data)
