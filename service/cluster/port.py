"""The port to the cluster: the requests that the service makes, independent of Ray.

`service.cluster.ray.gateway.GatewayCluster`, which talks to Ray through a child process, passes the
same conformance suite as the fake and the simulated cluster of the tests (`tests/contract`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, PollReply
from ray_workers.shared.node_needs import NodeEnvironment, NodeNeeds
from ray_workers.shared.quarantine import Quarantined


class ClusterUnavailable(Exception):
    """The cluster can't be reached now; try again later. The request may still have arrived."""


@dataclass(frozen=True)
class ClusterNode:
    """One node of the cluster."""

    node_id: str
    hostname: str
    alive: bool
    resources: Mapping[str, float]
    """All resources of the node: `CPU`, `GPU`, `memory`, `accelerator_type:...`."""
    available: Mapping[str, float]
    """The part of the resources that no job holds, neither ours nor others'."""
    accepted: bool
    problem: str | None
    """Why the node may not carry ranks."""
    full: str | None
    """Why the node can't write reports and temporary files; it may still carry ranks."""
    quarantined: tuple[Quarantined, ...] | None
    """Slots of ended attempts that are not clean, and so not available. None before the node has
    reported."""
    drained_by: float | None
    """Unix time when the node leaves, `math.inf` if the time is unknown; None if it stays. A node
    that leaves is not accepted."""
    labels: Mapping[str, str]
    """Ray's labels of the node, such as `ray.io/market-type`, without the label of its id."""
    is_starting: bool
    """Whether the node is not accepted yet only because it is starting."""
    is_released: bool
    """Whether dray's processes were removed by `Cluster.request_nodes`; not accepted meanwhile."""
    is_never_released: bool
    """Whether it is the head, which Ray never ends, or a control node, where supervisors run."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster at one moment."""

    session: str
    """Changes when the cluster is restarted: no process of an older session is alive."""
    address: str
    dashboard_url: str | None
    shared: bool
    """Whether others may use the cluster, so that free slots may disappear."""
    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True)
class AttemptRef:
    """An attempt, and the nodes on which it was placed."""

    job_id: str
    attempt: int
    session: str
    node_ids: tuple[str, ...]


class Cluster(Protocol):
    """The cluster for the scheduler and the reconciler. Methods may raise ClusterUnavailable."""

    async def start(self) -> None:
        """Begin to connect, without waiting for the connection."""

    async def stop(self) -> None:
        """Disconnect from the cluster. Its attempts go on, unless the cluster is embedded."""

    async def snapshot(self) -> ClusterSnapshot:
        """Return the nodes and their resources, and prepare new nodes to carry ranks."""

    async def launch(self, spec: AttemptSpec) -> None:
        """Start an attempt. If the answer is lost, the attempt is ended, never launched again.

        A launch after `give_up` is refused: the next attempt may run by then.
        """

    async def give_up(self, ref: AttemptRef) -> None:
        """Prevent the launch of the attempt from now on. An attempt that was launched is not
        affected. Idempotent."""

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        """Return the reports of an attempt after `cursor`.

        If its supervisor is gone, return the frames that its spools still hold, and an outcome once
        all of its processes are known to be dead.
        """

    async def send(self, ref: AttemptRef, command: Command) -> None:
        """Send a command to an attempt; does nothing if its supervisor is gone. `poll` reports the
        effects. Idempotent: commands with the same `name` are one command."""

    async def acknowledge(self, ref: AttemptRef) -> None:
        """Forget the attempt, whose outcome is stored. Idempotent."""

    async def attempts(self) -> list[AttemptRef]:
        """Return every attempt of this deployment that the cluster still knows."""

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        """Request a cluster from Ray's autoscaler that could hold all these bundles while empty.

        Each bundle has a count, and fits only nodes with its labels. Without bundles, Ray
        chooses the size. The call also ends dray's own processes on the released nodes, since Ray
        would never consider these idle; a node that a later call does not name gets them again.
        Idempotent.
        """

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        """Return a node's progress with the needs of a job, and begin if necessary. Idempotent."""

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        """End the preparation of these needs on a node unless others need it: no job of their owner
        waits for it any more. Idempotent."""

    async def kept_jobs(self) -> list[str]:
        """Return the jobs that have a working directory on a node."""

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        """Delete the working directories of these deleted jobs on every node that answers.
        Idempotent."""
