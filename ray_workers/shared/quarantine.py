"""Quarantine of slots. A quarantined slot is not given to any job, because processes that ran in
the slot still exist.

The placement group of a quarantined slot is not removed, so Ray shows the slot and its stuck GPU as
in use, even after the service restarts. The records in this module contain the attempt, the time
and the reason. The node's agent releases a slot once it is clean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Quarantined:
    """The quarantined slots of an attempt on a node."""

    job_id: str
    attempt: int
    slots: int
    resources: Mapping[str, float]
    """Resources of the slots, by Ray's names."""
    reason: str
    since: float
    """Unix time in seconds by the node's clock."""


class QuarantineBook:
    """Records of the quarantined slots on a node, in a folder that outlives the node's agent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def entries(self) -> list[Quarantined]:
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(Quarantined(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):
                continue
        return found

    def get(self, job_id: str, attempt: int) -> Quarantined | None:
        key = (job_id, attempt)
        return next((e for e in self.entries() if (e.job_id, e.attempt) == key), None)

    def put(self, entry: Quarantined) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(entry.job_id, entry.attempt)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(entry)))
        draft.replace(path)

    def remove(self, job_id: str, attempt: int) -> None:
        self._path(job_id, attempt).unlink(missing_ok=True)

    def _path(self, job_id: str, attempt: int) -> Path:
        return self._directory / f"{job_id}.{attempt}.json"
