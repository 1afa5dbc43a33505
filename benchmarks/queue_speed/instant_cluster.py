"""A cluster on which jobs succeed as soon as they are launched: what is left is the queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from ray_workers.shared.contracts import (
    AttemptSpec,
    Cause,
    Drill,
    Grant,
    Outcome,
    Phase,
    PollReply,
    Recall,
)
from ray_workers.shared.node_needs import BuildState, JobNeed, NodeEnvironment, NodeNeeds
from service.cluster.port import AttemptRef, ClusterNode, ClusterSnapshot

SESSION = "instant"
STAYS = "stays"
"""Name of jobs that do not end."""
READY = NodeEnvironment(JobNeed.ENVIRONMENT, BuildState.READY, "", packages=(), replaced=(), log="")


class InstantCluster:
    """The port of `service.cluster.port`, in this process."""

    def __init__(self, num_nodes: int, cpus_per_node: int) -> None:
        resources = {"CPU": float(cpus_per_node)}
        self._nodes = tuple(_node(f"node-{n}", resources) for n in range(num_nodes))
        self._ended: dict[tuple[str, int], float] = {}
        """Unix time at which each attempt was launched, and so ended."""
        self._staying: set[tuple[str, int]] = set()

    async def start(self) -> None:
        """There is nothing to connect to."""

    async def stop(self) -> None:
        """There is nothing to leave."""

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
        done = Outcome.of(Cause.SUCCEEDED, "all ranks ended well")
        return PollReply(cursor, Phase.ENDED, times, (), more=False, outcome=done, silent=())

    async def stop_attempt(self, ref: AttemptRef) -> None:
        """It has ended."""

    async def preempt(self, ref: AttemptRef, grace_s: float) -> None:
        """It has ended."""

    async def drill(self, ref: AttemptRef, drill: Drill) -> None:
        """It has ended."""

    async def grow(self, ref: AttemptRef, grant: Grant) -> None:
        """It has ended."""

    async def recall(self, ref: AttemptRef, recall: Recall) -> None:
        """It has ended."""

    async def acknowledge(self, ref: AttemptRef) -> None:
        self._ended.pop((ref.job_id, ref.attempt), None)

    async def attempts(self) -> list[AttemptRef]:
        return [AttemptRef(job, attempt, SESSION, ()) for job, attempt in self._ended]

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        """No node comes."""

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        await asyncio.sleep(0)
        return READY

    async def kept_jobs(self) -> list[str]:
        return []

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        """Nothing is kept."""


def _node(node_id: str, resources: Mapping[str, float]) -> ClusterNode:
    return ClusterNode(
        node_id=node_id,
        hostname=node_id,
        alive=True,
        resources=resources,
        available=resources,
        accepted=True,
        is_never_released=False,
        problem=None,
        full=None,
        quarantined=(),
        drained_by=None,
        labels={},
        is_starting=False,
        is_released=False,
    )
