"""Writes the reports of a supervisor to a separate spool on its node."""

from __future__ import annotations

from pathlib import Path

from dray.train.spool import SpoolWriter
from ray_workers.shared.contracts import SUPERVISOR_RANK
from ray_workers.shared.frames import Report
from ray_workers.shared.spool_reader import spool_key


class Reporter:
    """Writes frames whose rank is SUPERVISOR_RANK. These frames are delivered like the frames of
    other ranks."""

    def __init__(self, spool_dir: Path, limit_bytes: int) -> None:
        """`spool_dir` is the attempt's spool directory on this node."""
        path = spool_dir / spool_key(SUPERVISOR_RANK, 0, "supervisor")
        self._spool = SpoolWriter(path, limit_bytes=limit_bytes)

    def report(self, report: Report) -> None:
        self._spool.append(report.KIND, report.body())

    def close(self) -> None:
        self._spool.close()
