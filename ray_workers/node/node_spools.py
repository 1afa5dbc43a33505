"""A node's spools, which contain its ranks' reports. Reports are masked before they leave the node.

Spools outlive the ranks, their supervisor and their node. Spools of dead nodes on this machine are
also read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ray_workers.node import session_records
from ray_workers.node.secret_masking import Maskers, mask_frames
from ray_workers.node.silo_gate import SiloGate, SiloRules
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.paths import deployment_root, entries, runtime_dir, spools_of
from ray_workers.shared.secret_files import Masker
from ray_workers.shared.spool_reader import SpoolRead

POLL_S = 0.05
"""Minimum seconds between two checks of the spools. Each check makes a few stat calls."""
MAX_POLL_S = 0.5
POLL_SHARE = 0.1
"""Maximum pause as a fraction of the time without new frames. If steps are long, pauses are long
too, which leaves more CPU time for the ranks."""


class NodeSpools:
    def __init__(self, deployment_id: str, node_id: str) -> None:
        self._deployment_id = deployment_id
        self._directory = runtime_dir(deployment_id, node_id)
        self._maskers = Maskers()
        self._silos = SiloGate()

    def of(self, job_id: str, attempt: int) -> Path:
        """Return the folder of an attempt's spools."""
        return spools_of(self._directory) / job_id / str(attempt)

    def masker(self, job_id: str, attempt: int) -> Masker:
        """Return the masker for an attempt's secrets."""
        return self._maskers.of(self.of(job_id, attempt))

    def silo(self, job_id: str, attempt: int, rank: int) -> SiloRules | None:
        """Return the rules for the reports of a silo's rank; None for other ranks."""
        return self._silos.silo(self.of(job_id, attempt), rank)

    async def read(
        self, job_id: str, attempt: int, cursor: Mapping[str, int], max_bytes: int, wait_s: float
    ) -> SpoolRead:
        """Return new frames from each of an attempt's spools. If there are no frames, wait up to
        `wait_s` for the first one.

        Frames before `cursor`, which the service has already stored, are deleted.
        """
        directory = self.of(job_id, attempt)
        spool_reader.acknowledge(directory, _keys(directory), cursor)
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            keys = _keys(directory)
            if any(spool_reader.has_more(directory / key, cursor.get(key, 0)) for key in keys):
                break
            if (left_s := deadline - asyncio.get_running_loop().time()) <= 0:
                break
            quiet_s = spool_reader.quiet_s([directory / key for key in keys], time.time())
            await asyncio.sleep(min(left_s, max(POLL_S, min(POLL_SHARE * quiet_s, MAX_POLL_S))))
        read = spool_reader.read_all(directory, keys, cursor, max_bytes)
        return replace(
            read, data={key: self._let_out(directory, key, d) for key, d in read.data.items()}
        )

    def read_left(
        self, job_id: str, attempt: int, cursor: Mapping[str, int], max_bytes: int
    ) -> dict[str, bytes]:
        """Like `read`, but return new frames from an attempt's spools on dead nodes of this
        machine."""
        found: dict[str, bytes] = {}
        for spools in self._of_dead_nodes():
            directory = spools / job_id / str(attempt)
            keys = _keys(directory)
            spool_reader.acknowledge(directory, keys, cursor)
            read = spool_reader.read_all(directory, keys, cursor, max_bytes)
            found |= {key: self._let_out(directory, key, d) for key, d in read.data.items()}
        return found

    def errors(self, job_id: str, attempt: int) -> list[Frame]:
        """Return the ERROR frames that an attempt's ranks wrote on this node before they ended."""
        directory = self.of(job_id, attempt)
        return [
            frame
            for key in _keys(directory)
            for frame in spool_reader.decode(
                key, self._let_out(directory, key, spool_reader.tail(directory / key))
            )
            if frame.kind is FrameKind.ERROR
        ]

    def attempts(self) -> list[tuple[str, int]]:
        """Return (job, attempt) of the spools on this node, and on dead nodes of this machine."""
        roots = (spools_of(self._directory), *self._of_dead_nodes())
        jobs = [job for spools in roots for job in entries(spools)]
        return [(job.name, int(attempt.name)) for job in jobs for attempt in entries(job)]

    def drop(self, job_id: str, attempt: int) -> None:
        """Delete an attempt's spools, including spools on dead nodes of this machine."""
        left = (spools / job_id / str(attempt) for spools in self._of_dead_nodes())
        for directory in (self.of(job_id, attempt), *left):
            spool_reader.remove(directory)
            self._maskers.forget(directory)

    def _let_out(self, spools: Path, key: str, data: bytes) -> bytes:
        """Reduce complete lines of a spool to the content that is allowed to leave this node."""
        return mask_frames(self._silos.frames(spools, key, data), self._maskers.of(spools))

    def _of_dead_nodes(self) -> list[Path]:
        deployment = deployment_root(self._deployment_id)
        return [spools_of(n) for n in session_records.dead_nodes(deployment, self._directory)]


def _keys(directory: Path) -> list[str]:
    names = (path.name for path in entries(directory))
    return sorted((n for n in names if not n.startswith(".")), key=spool_reader.parse_key)
