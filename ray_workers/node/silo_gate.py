"""The gate of a federated silo: it decides what of its ranks may leave their node.

A rank whose data must stay on its node writes its reports as any rank does. The node agent, through
which all of it leaves the node, lets out what the owner of the node has opened, and the metrics
that both the job and the owner name. It knows a silo by a file beside the spools, so that nothing
depends on the code of the rank. The owner decides by variables of the node's Ray; a job has no say.
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
FOR_SILOS_ALONE: Final = f"the node has a silo's data ({SOURCE}), and takes ranks of silos alone"
OUTPUT: Final = "output.log"
"""The output of a silo's ranks, and errors of their starts, where they are not opened."""
_NOTE: Final = ".silo-"
"""Of a rank, before its number."""
_AGGREGATOR: Final = 0
"""Rank that may run on a silo's node and has none of its data."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Opening(StrEnum):
    """Something that the owner of a silo's node may open."""

    LOGS = "logs"
    """Lines of its ranks' output, and the messages and tracebacks of their errors."""
    STACKS = "stacks"
    """Stacks of its ranks' threads, in bundles of hangs."""
    FILES = "files"
    """Artifacts, sample pictures and checkpoints that its ranks save."""
    SYSTEM_METRICS = "system_metrics"
    """Processors and memory that its ranks use."""


OPENED_BY: Final = {
    FrameKind.LOG: Opening.LOGS,
    FrameKind.ERROR: Opening.LOGS,
    FrameKind.ARTIFACT: Opening.FILES,
    FrameKind.CHECKPOINT: Opening.FILES,
    FrameKind.CHECKPOINT_DROPPED: Opening.FILES,
}
"""The words that let frames of a kind leave as they are; of other kinds none does."""


@dataclass(frozen=True)
class SiloRules:
    """A silo of an attempt on this node, with what its owner allows."""

    name: str
    opens: Set[Opening]
    metrics: Set[str]

    def frames(self, data: bytes) -> bytes:
        """Whole lines of a spool, of which only what may leave. Each line keeps its length, since
        offsets count by it; spaces take the room of what stays."""
        return b"".join(self._line(line) for line in data.splitlines(keepends=True))

    def _line(self, line: bytes) -> bytes:
        nothing = b" " * (len(line) - 1) + b"\n"
        try:
            frame = json.loads(line)
            kind, body = FrameKind(frame["kind"]), frame["body"]
            if OPENED_BY.get(kind) in self.opens:
                return line
            kept = self._closed(kind, body)
            told = {"kind": kind, "time": _number(frame["time"]), "body": kept}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return nothing  # no frame
        if kept is None:
            return nothing
        text = _encode(told).encode()
        return nothing if len(text) >= len(line) else text.ljust(len(line) - 1) + b"\n"

    def _closed(self, kind: FrameKind, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The part that may leave of a frame of a kind that is not open; None for none."""
        if kind is FrameKind.METRICS:
            values = {n: _number(v) for n, v in body["values"].items() if n in self.metrics}
            return {"step": _number(body["step"]), "values": values} if values else None
        return self._closed_error(body) if kind is FrameKind.ERROR else None

    def _closed_error(self, body: Mapping[str, Any]) -> dict[str, Any]:
        # Short, so that it has room in the line that it replaces.
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
        return f"the stacks of silo {self.name} stay on its node"


def _number(value: Any) -> float:
    """As it is; TypeError for anything else."""
    if type(value) not in (int, float):
        raise TypeError
    number: float = value
    return number


def owner_opens(environ: Mapping[str, str]) -> frozenset[Opening]:
    """The words of the list that the node's owner has set; ValueError for one that is none."""
    words = (word.strip() for word in environ.get(OPENS, "").split(","))
    return frozenset(Opening(word) for word in words if word)


def owner_metrics(environ: Mapping[str, str], asked: Set[str]) -> frozenset[str]:
    """Those metrics of a job that may leave: all, unless the owner lists some."""
    if METRICS not in environ:
        return frozenset(asked)
    return frozenset(asked & {word.strip() for word in environ[METRICS].split(",")})


def has_source(environ: Mapping[str, str]) -> bool:
    """Whether the node's owner names a silo's data: then it carries ranks of silos alone."""
    return bool(environ.get(SOURCE))


def silo_of(task: RankTask) -> Mapping[str, Any] | None:
    """The silo of the document that a rank is; None of a rank that is none."""
    silos = (task.spec.get("federated") or {}).get("silos")
    if not silos or task.rank == _AGGREGATOR:
        return None
    found: Mapping[str, Any] = silos[task.rank - 1]
    return found


def folder_of(task: RankTask) -> Path:
    """The folder in which the files of a silo stay until its job is deleted."""
    return Path(task.work_dir, "silo", f"attempt-{task.attempt}", f"rank-{task.rank}")


def keep(task: RankTask, text: str) -> None:
    """Add to the silo's output, which stays on its node, as far as there is room."""
    folder = folder_of(task)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / OUTPUT).open("a") as file:
            file.write(text)


def at_home(task: RankTask, environ: Mapping[str, str]) -> RankTask:
    """The task of a silo as its node's owner allows it: its files stay here unless they are opened,
    it gets no other job's, and it sends no metric that may not leave."""
    metrics = owner_metrics(environ, set(task.spec["federated"]["metrics"]))
    federated = {**task.spec["federated"], "metrics": sorted(metrics)}
    own = environ.get(SOURCE)
    if own and task.silo_source not in (None, "", own):
        raise ValueError(f"{SOURCE} names other data than the job document: leave out its `source`")
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
    """Leave for the node's agent what it must know of a silo that is about to start."""
    silo = silo_of(task)
    if silo is None:
        return
    spools = Path(task.spool_dir).parent
    spools.mkdir(parents=True, exist_ok=True)
    partial = spools / f".{secrets.token_hex(8)}"
    partial.write_text(json.dumps([silo["name"], task.spec["federated"]["metrics"]]))
    partial.replace(spools / f"{_NOTE}{task.rank}")


class SiloGate:
    """The silos of attempts on this node, by the folder of their spools."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def silo(self, spools: Path, rank: int) -> SiloRules | None:
        """None of a rank that is no silo, or has not begun. A rank that took the place of another
        may count anew; where there is a silo, every rank but the aggregator is one."""
        notes = [path for path in entries(spools) if path.name.startswith(_NOTE)]
        if not notes or rank == _AGGREGATOR:
            return None
        own = spools / f"{_NOTE}{rank}"
        name, metrics = json.loads((own if own in notes else min(notes)).read_text())
        opens = owner_opens(self._environ)
        return SiloRules(name, opens, owner_metrics(self._environ, set(metrics)))

    def frames(self, spools: Path, key: str, data: bytes) -> bytes:
        """The data of a spool as they may leave the node."""
        silo = self.silo(spools, parse_key(key)[0])
        return data if silo is None else silo.frames(data)
