"""Tiresias (Gu et al., NSDI 2019): two queues by attained service, each first come, first served.

https://www.usenix.org/conference/nsdi19/presentation/gu
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.scheduler.replay import (
    GPUS_PER_NODE,
    NUM_NODES,
    Allocation,
    ReplayedJob,
    on_emptiest_nodes,
)

LONG_GPU_S = 16 * 3600.0
"""GPU-seconds after which a job waits behind jobs that have used less."""


class Tiresias:
    """A preemptive policy. If a job does not fit, jobs behind it can start."""

    def __init__(self) -> None:
        self._long: list[str] = []

    def allocate(self, jobs: Sequence[ReplayedJob], now: float) -> Allocation:
        """See `ReplayedPolicy`."""
        is_long = {job.name for job in jobs if job.gpu_s >= LONG_GPU_S}
        self._long += [job.name for job in jobs if job.name in is_long - set(self._long)]
        short = [job for job in jobs if job.name not in is_long]
        long = [job for job in jobs if job.name in is_long]
        long.sort(key=lambda job: self._long.index(job.name))
        left, chosen = NUM_NODES * GPUS_PER_NODE, []
        for job in (*short, *long):
            if job.num_gpus <= left:
                chosen.append(job)
                left -= job.num_gpus
        return on_emptiest_nodes(jobs, chosen)
