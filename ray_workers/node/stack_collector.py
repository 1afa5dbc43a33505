"""Collects the current stacks of all threads of an attempt's ranks.

On DUMP_SIGNAL, each rank appends its stacks to a file next to its heartbeat page
(`ray_workers.shared.processes.stack_writer`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ray_workers.node.forkserver.client import ask_dump, list_tasks
from ray_workers.shared.heartbeat import prefix_of, stack_path
from ray_workers.shared.processes.stack_writer import END

STACK_LIMIT_BYTES = 64 << 10
CHECK_S = 0.02
"""Seconds between two checks of a stack file."""
QUIET_S = 1.0
"""Seconds without growth after which a stack file counts as complete."""


@dataclass
class _Growing:
    """A stack file to which a rank is appending its stacks."""

    path: Path
    start: int
    size: int
    grew_at: float = 0.0

    def is_whole(self, now: float) -> bool:
        if (size := _size(self.path)) != self.size:
            self.size, self.grew_at = size, now
        if self.size == self.start:
            return False
        return now - self.grew_at > QUIET_S or self._added().endswith(END)

    def text(self) -> str:
        added = self._added().removesuffix(END)
        return added[:STACK_LIMIT_BYTES].decode(errors="replace")

    def _added(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                return file.read()
        except FileNotFoundError:
            return b""


async def collect(
    socket_path: str,
    directory: Path,
    job_id: str,
    attempt: int,
    ranks: Iterable[int],
    wait_s: float,
) -> dict[int, str]:
    """Return the stacks of the ranks that run on this node. Ranks that wrote no stacks in time are
    omitted.

    A suspended rank is resumed, so that its signal handler can run. Raises ForkFailed if there is
    no forkserver.
    """
    incarnations: dict[int, int] = {}
    for task in await list_tasks(socket_path):
        if (task["job_id"], task["attempt"]) == (job_id, attempt):
            known = incarnations.get(task["rank"], -1)
            incarnations[task["rank"]] = max(known, task["incarnation"])
    growing: dict[int, _Growing] = {}
    for rank in incarnations.keys() & set(ranks):
        path = stack_path(prefix_of(directory, rank, incarnations[rank]))
        start = _size(path)
        if await ask_dump(socket_path, job_id, attempt, rank):
            growing[rank] = _Growing(path, start, start)
    deadline, left = time.monotonic() + wait_s, set(growing)
    while left and (now := time.monotonic()) < deadline:
        left = {rank for rank in left if not growing[rank].is_whole(now)}
        await asyncio.sleep(CHECK_S if left else 0.0)
    return {rank: text for rank, file in sorted(growing.items()) if (text := file.text())}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
