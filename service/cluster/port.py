"""The port to the cluster: the interface that the service uses, independent of Ray.

`service.cluster.ray.gateway.GatewayCluster`, which communicates with Ray through a child process,
and the fake and simulated clusters of the tests all pass the same conformance suite
(`tests/contract`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, PollReply
from ray_workers.shared.gpu_faults import GpuFault
from ray_workers.shared.node_needs import NodeEnvironment, NodeNeeds
from ray_workers.shared.quarantine import Quarantined
from ray_workers.shared.self_tests import NodeTest

DRAINED = "the node is being drained"
"""The beginning of `ClusterNode.problem` of a node that Ray was asked to remove."""


class ClusterUnavailable(Exception):
    """Raised if the cluster currently can't be reached. The request might have arrived. Callers
    should try again later."""


@dataclass(frozen=True)
class ClusterNode:
    """One node of the cluster."""

    node_id: str
    hostname: str
    alive: bool
    resources: Mapping[str, float]
    """All resources of the node: `CPU`, `GPU`, `memory`, `accelerator_type:...`."""
    available: Mapping[str, float]
    """The resources that are not in use by dray's jobs or other programs."""
    accepted: bool
    problem: str | None
    """The reason why ranks can't run on the node; None if they can."""
    full: str | None
    """The reason why the node can't write reports and temporary files; None if it can. Ranks can
    run on the node in either case."""
    quarantined: tuple[Quarantined, ...] | None
    """Slots of ended attempts that are not available yet, because they have not been cleaned up.
    None until the node has reported."""
    drained_by: float | None
    """Unix time at which the node will leave; `math.inf` if the time is unknown, and None if the
    node won't leave. A node that will leave is not accepted."""
    labels: Mapping[str, str]
    """The node's Ray labels, such as `ray.io/market-type`, except for the label with the node's
    id."""
    is_starting: bool
    """Whether the only reason for not accepting the node is that it is still starting."""
    is_released: bool
    """Whether `Cluster.request_nodes` has removed dray's processes from the node. If true, the node
    is not accepted."""
    is_never_released: bool
    """Whether the node is the head, which Ray never removes, or a control node, on which
    supervisors run."""
    gpu_faults: tuple[GpuFault, ...] | None
    """Faults of the node's GPUs. None until the node has reported."""
    memory_bytes: int | None
    """Host memory of the node, including memory that is in use. None until the node has
    reported."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """The state of the cluster at a point in time."""

    session: str
    """Identifies the session of the cluster. A restarted cluster has a new session. Processes of an
    earlier session are never alive."""
    address: str
    dashboard_url: str | None
    shared: bool
    """Whether other programs can use the cluster. If so, free slots can disappear."""
    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True)
class AttemptRef:
    """An attempt and the nodes on which it was placed."""

    job_id: str
    attempt: int
    session: str
    node_ids: tuple[str, ...]


class Cluster(Protocol):
    """The cluster as seen by the scheduler and the reconciler. All methods can raise
    ClusterUnavailable."""

    async def start(self) -> None:
        """Start connecting. Does not wait for the connection."""

    async def stop(self) -> None:
        """Disconnect from the cluster. The attempts continue, unless the cluster is embedded."""

    async def snapshot(self) -> ClusterSnapshot:
        """Return the nodes and their resources, and prepare new nodes to run ranks."""

    async def launch(self, spec: AttemptSpec) -> None:
        """Start an attempt. If the response is lost, the attempt is ended instead of being launched
        again.

        A launch after `give_up` is refused, because the next attempt might already be running.
        """

    async def give_up(self, ref: AttemptRef) -> None:
        """Prevent any later launch of the attempt. An attempt that has already been launched is not
        affected. Idempotent."""

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        """Return the reports of an attempt after `cursor`.

        If the supervisor is gone, return the frames that remain in the attempt's spools, and an
        outcome once all of its processes are known to be dead.
        """

    async def send(self, ref: AttemptRef, command: Command) -> None:
        """Send a command to an attempt. Does nothing if the attempt's supervisor is gone. `poll`
        reports the effects. Idempotent: commands with the same `name` count as one command."""

    async def acknowledge(self, ref: AttemptRef) -> None:
        """Forget an attempt whose outcome the service has stored. Idempotent."""

    async def attempts(self) -> list[AttemptRef]:
        """Return all attempts of this deployment for which the cluster still has records or
        slots."""

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        """Request from Ray's autoscaler a cluster that could hold all these bundles if it were
        empty.

        `bundles` contains pairs of a bundle and a count. A bundle fits only on nodes with its
        labels. Without bundles, Ray chooses the size of the cluster. The call also ends dray's own
        processes on the nodes in `released`, because Ray would otherwise never consider these nodes
        idle. If a later call omits a node from `released`, dray's processes are started on the node
        again. Idempotent.
        """

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        """Return the state of a job's needs on a node, and start preparing them if necessary.
        Idempotent."""

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        """Withdraw the owner's request to prepare `needs` on a node, because none of the owner's
        jobs is waiting for them any longer. The preparation continues if jobs of other owners have
        the same needs. Idempotent."""

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        """Return the state of a self-test of a node's free GPUs, and start the test if the node
        doesn't know it.

        num_held: the number of GPUs of the node's host that jobs hold. Idempotent, but a node that
        restarts forgets its tests.
        """

    async def kept_jobs(self) -> list[str]:
        """Return the jobs that have a working directory on some node."""

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        """Delete the working directories of these deleted jobs on every node that responds.
        Idempotent."""
