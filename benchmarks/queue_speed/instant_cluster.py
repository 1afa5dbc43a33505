"""A cluster on which jobs succeed as soon as they are launched, so that only the queue takes
time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from benchmarks.still_cluster import StillCluster, node
from ray_workers.shared.contracts import AttemptSpec, Cause, Outcome, Phase, PollReply
from service.cluster.port import AttemptRef, ClusterSnapshot

SESSION = "instant"
STAYS = "stays"
"""Name of jobs that never end."""


class InstantCluster(StillCluster):
    """An in-process implementation of `service.cluster.port`."""

    def __init__(self, num_nodes: int, cpus_per_node: int) -> None:
        resources = {"CPU": float(cpus_per_node)}
        self._nodes = tuple(node(f"node-{n}", resources, resources) for n in range(num_nodes))
        self._ended: dict[tuple[str, int], float] = {}
        """Unix time at which each attempt was launched, and therefore ended."""
        self._staying: set[tuple[str, int]] = set()

    async def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(SESSION, "instant:6379", None, shared=False, nodes=self._nodes)

    async def launch(self, spec: AttemptSpec) -> None:
        key = (spec.job_id, spec.attempt)
        self._ended[key] = time.time()
        if spec.spec["name"] == STAYS:
            self._staying.add(key)

    async def give_up(self, ref: AttemptRef) -> None:
        self._ended.pop((ref.job_id, ref.attempt), None)

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        key = (ref.job_id, ref.attempt)
        if key in self._staying:
            await asyncio.sleep(wait_s)
            return PollReply(cursor, Phase.STARTING, {}, (), more=False, outcome=None, silent=())
        at = self._ended.get(key)
        if at is None:
            lost = Outcome.unseen(Cause.SUPERVISOR_LOST, "it was never launched")
            return PollReply(cursor, Phase.ENDED, {}, (), more=False, outcome=lost, silent=())
        times = {str(phase): at for phase in (Phase.ACQUIRING, Phase.STARTING, Phase.ENDED)}
        done = Outcome.of(Cause.SUCCEEDED, "all ranks succeeded")
        return PollReply(cursor, Phase.ENDED, times, (), more=False, outcome=done, silent=())

    async def acknowledge(self, ref: AttemptRef) -> None:
        self._ended.pop((ref.job_id, ref.attempt), None)

    async def attempts(self) -> list[AttemptRef]:
        return [AttemptRef(job, attempt, SESSION, ()) for job, attempt in self._ended]
