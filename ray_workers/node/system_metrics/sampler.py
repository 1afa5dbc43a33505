"""Samples of the resource usage of each attempt's ranks on a node, and of the node itself."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_workers.node import session_records
from ray_workers.node.system_metrics.gpus import GpuMeter
from ray_workers.node.system_metrics.machine import MachineMeter, MachineReading
from ray_workers.node.system_metrics.processes import RankReading, Values, read_rank, rounded

LIMIT_S = 1.0
"""Maximum time in seconds to wait for a sample, so that a slow sample doesn't delay the observation
that contains it."""

LEAST_PASSED_S = 1.0
"""Minimum time in seconds between two readings from which a rate is computed. Over a shorter time,
the resolution of the CPU clock makes the rate meaningless. Readings can be close together because
an agent that was suspended answers all waiting calls at once when it continues."""

Attempt = tuple[str, int]


@dataclass(frozen=True)
class _Reading:
    """The state of an attempt on this node at a point in time."""

    at: float
    """Time of the reading, on a monotonic clock."""
    machine: MachineReading
    ranks: Mapping[int, RankReading]


class SystemMetricsSampler:
    """Takes samples. Rates are averages since the attempt's previous sample."""

    def __init__(
        self,
        sessions: Path,
        *,
        machine: MachineMeter | None = None,
        gpus: GpuMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sessions` is the folder of the node's session records."""
        self._sessions = sessions
        self._machine = machine or MachineMeter()
        self._gpus = gpus or GpuMeter()
        self._clock = clock
        self._before: dict[Attempt, _Reading] = {}
        self._under_way: dict[Attempt, asyncio.Future[dict[int, Values]]] = {}

    async def sample(self, job_id: str, attempt: int) -> dict[int, Values]:
        """Return the values, keyed by rank; the entry of the lowest rank also contains the values
        of the node. The result is empty if the attempt has no rank on this node, or if its last
        sample has not finished, which can happen because reading /proc can block on the process
        that is read."""
        key = (job_id, attempt)
        if key in self._under_way:
            return {}
        work = asyncio.ensure_future(asyncio.to_thread(self._sample_or_nothing, key))
        self._under_way[key] = work
        work.add_done_callback(lambda _: self._under_way.pop(key, None))
        await asyncio.wait({work}, timeout=LIMIT_S)
        return work.result() if work.done() else {}

    def forget(self, job_id: str, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._before.pop((job_id, attempt), None)

    def _sample_or_nothing(self, key: Attempt) -> dict[int, Values]:
        try:
            return self.read(*key)
        except Exception:  # an unexpected file in /proc must not hide the ranks
            traceback.print_exc()
            return {}

    def read(self, job_id: str, attempt: int) -> dict[int, Values]:
        """Take a sample in the calling thread."""
        key = (job_id, attempt)
        sessions = session_records.sessions_of(self._sessions, *key)
        records = {
            one.rank: one for one in sessions if one.rank >= 0
        }  # a store process has no rank
        read = {rank: read_rank(record) for rank, record in records.items()}
        ranks = {rank: reading for rank, reading in sorted(read.items()) if reading is not None}
        if not ranks:
            return {}
        now = _Reading(self._clock(), self._machine.read(), ranks)
        before = self._before.get(key)
        is_late = before is None or now.at - before.at >= LEAST_PASSED_S
        found = _values(now, before if is_late else None)
        if is_late:
            self._before[key] = now
        gpus = {rank: records[rank].gpu_names for rank in ranks}
        of_gpus = self._gpus.read({name for names in gpus.values() for name in names})
        for rank, names in gpus.items():
            for number, name in enumerate(names):
                values = of_gpus.get(name, {})
                found[rank] |= {f"system/gpu/{number}/{w}": v for w, v in values.items()}
        return {rank: rounded(values) for rank, values in found.items()}


def _values(now: _Reading, before: _Reading | None) -> dict[int, Values]:
    found = {rank: reading.values() for rank, reading in now.ranks.items()}
    of_node = now.machine.values()
    if before is not None:
        passed_s = now.at - before.at
        of_node |= now.machine.rates_since(before.machine, passed_s)
        for rank, reading in now.ranks.items():
            if rank in before.ranks:
                found[rank] |= reading.rates_since(before.ranks[rank], passed_s)
    found[min(found)] |= of_node
    return found
