"""The processes and the GPU memory that remain on a node after an attempt has ended. The attempt's
slots are released once no process or GPU memory of the attempt remains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_workers.node import orphans, session_records
from ray_workers.node.gpu_memory import GpuMemory
from ray_workers.shared.processes.procfs import command, find_members, started_ticks, stat_fields


@dataclass(frozen=True)
class AttemptResidue:
    """The processes and the GPU memory that an attempt has left behind on a node. Falsy if nothing
    remains."""

    pids: tuple[int, ...]
    gpu_bytes: Mapping[str, int]
    """Number of bytes that are still held for dead processes, keyed by GPU."""

    def __bool__(self) -> bool:
        return bool(self.pids or self.gpu_bytes)

    def __len__(self) -> int:
        return len(self.pids) + len(self.gpu_bytes)

    def sentence(self) -> str:
        """Explain to users why the slots are not free."""
        reasons = []
        if self.pids:
            shown = ", ".join(_shown(pid) for pid in self.pids[:3])
            more = f" and {len(self.pids) - 3} more" if len(self.pids) > 3 else ""
            reasons.append(f"still alive after SIGKILL: {shown}{more}")
        for gpu, amount in self.gpu_bytes.items():
            size = f"{amount / 2**20:.0f} MiB" if amount else "memory"
            reasons.append(f"GPU {gpu}: {size} still allocated to processes that have ended")
        return "; ".join(reasons) or "nothing remains"


def _shown(pid: int) -> str:
    fields = stat_fields(pid)
    return f"pid {pid} ({command(pid)}, state {fields[0].decode()})" if fields else f"pid {pid}"


def of_attempt(
    directory: Path,
    tasks: Sequence[Mapping[str, Any]],
    job_id: str,
    attempt: int,
    gpu_memory: GpuMemory,
    ranks: Sequence[int] | None = None,
) -> AttemptResidue:
    """Return the remaining processes and GPU memory of an attempt, or of the given ranks.

    `directory` contains the records of the node's sessions. `tasks` is the forkserver's list, which
    is empty if the forkserver is dead. SIGKILL is sent to processes that a dead forkserver has left
    behind."""

    def matches(one: tuple[str, int, int]) -> bool:
        return one[:2] == (job_id, attempt) and (ranks is None or one[2] in ranks)

    mine = [task for task in tasks if matches((task["job_id"], task["attempt"], task["rank"]))]
    pids = {int(pid) for task in mine for pid in task["left"] or [task["pid"]]}
    orphans.reap(directory)
    listed = {task["pid"] for task in mine}
    unlisted = [
        record
        for record in session_records.read_sessions(directory)
        if matches((record.job_id, record.attempt, record.rank)) and record.pid not in listed
    ]
    members = find_members([record.session() for record in unlisted])
    held: dict[str, int] = {}
    for record in unlisted:
        pids.update(members[record.mark])
        if members[record.mark] or not record.gpus:
            continue
        amounts = [
            amount
            for pid, amount in gpu_memory.held(record.gpus).items()
            if pid == record.pid or (started_ticks(pid) is None and not record.shares_gpus)
        ]
        if amounts:
            held[record.gpus] = sum(amounts)
        else:
            session_records.remove_session(directory, record)
    return AttemptResidue(tuple(sorted(pids)), held)
