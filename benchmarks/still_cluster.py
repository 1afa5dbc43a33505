"""An in-memory cluster that does nothing. Benchmarks add the parts that they measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.node_needs import BuildState, JobNeed, NodeEnvironment, NodeNeeds
from ray_workers.shared.self_tests import NodeTest, TestPhase
from service.cluster.port import AttemptRef, ClusterNode

READY = NodeEnvironment(JobNeed.ENVIRONMENT, BuildState.READY, "", packages=(), replaced=(), log="")


class StillCluster:
    """Implements the port `service.cluster.port` without doing anything. Environments are always
    ready."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def launch(self, spec: AttemptSpec) -> None: ...

    async def give_up(self, ref: AttemptRef) -> None: ...

    async def send(self, ref: AttemptRef, command: Command) -> None: ...

    async def acknowledge(self, ref: AttemptRef) -> None: ...

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None: ...

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        """Do nothing, because nothing is prepared."""

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        return READY

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        return NodeTest(TestPhase.DONE)

    async def kept_jobs(self) -> list[str]:
        return []

    async def drop_jobs(self, job_ids: Sequence[str]) -> None: ...


def node(
    node_id: str, resources: Mapping[str, float], available: Mapping[str, float]
) -> ClusterNode:
    """Return a node that is accepted and remains."""
    return ClusterNode(
        node_id=node_id,
        hostname=node_id,
        alive=True,
        resources=resources,
        available=available,
        accepted=True,
        problem=None,
        full=None,
        quarantined=(),
        gpu_faults=(),
        memory_bytes=None,
        drained_by=None,
        labels={},
        is_starting=False,
        is_released=False,
        is_never_released=False,
    )
