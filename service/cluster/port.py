"""The port to the cluster: the service's requests, in the service's own words.

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
    """The cluster can't be reached now; ask again later. Nothing is known of what was asked."""


@dataclass(frozen=True)
class ClusterNode:
    """One node as the cluster knows it."""

    node_id: str
    hostname: str
    alive: bool
    resources: Mapping[str, float]
    """All of the node: `CPU`, `GPU`, `memory`, `accelerator_type:...`."""
    available: Mapping[str, float]
    """The part that no job holds, neither ours nor others'."""
    accepted: bool
    problem: str | None
    """Why the node may not carry ranks."""
    full: str | None
    """Why its folder for reports and temporary files takes no file; ranks may be put there."""
    quarantined: tuple[Quarantined, ...] | None
    """Slots of ended attempts that are not clean; they are not among the available. None while
    the node has not said."""
    drained_by: float | None
    """Unix time when the node goes, `math.inf` if nobody said when; None if it stays. One that
    goes is not accepted any more."""
    labels: Mapping[str, str]
    """Ray's labels of the node, such as `ray.io/market-type`, without that of its id."""
    is_starting: bool
    """It is not accepted yet, and nothing speaks against it."""
    is_released: bool
    """Nothing of dray is on it, as `Cluster.request_nodes` asked; it is not accepted meanwhile."""
    is_never_released: bool
    """Ray never ends the head, and supervisors live on control nodes."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cluster at one moment."""

    session: str
    """Changes when the cluster is started anew: nothing of an older session is alive."""
    address: str
    dashboard_url: str | None
    shared: bool
    """Whether others may use the cluster, so that free slots may vanish."""
    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True)
class AttemptRef:
    """An attempt, and the nodes that it was put on."""

    job_id: str
    attempt: int
    session: str
    node_ids: tuple[str, ...]


class Cluster(Protocol):
    """The cluster as the scheduler and the reconciler use it. Every method may raise
    ClusterUnavailable."""

    async def start(self) -> None:
        """Begin to connect; does not wait for it."""

    async def stop(self) -> None:
        """Leave the cluster. Attempts there go on, unless the cluster is our own."""

    async def snapshot(self) -> ClusterSnapshot:
        """Nodes and resources. Makes new nodes ready to carry ranks."""

    async def launch(self, spec: AttemptSpec) -> None:
        """Start an attempt. If the answer is lost, the attempt is ended, never launched again.

        One that comes after `give_up` is refused: the next attempt may run by then.
        """

    async def give_up(self, ref: AttemptRef) -> None:
        """From now on the attempt can't be launched; one that was is left as it is. Harmless to
        repeat."""

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        """The news of an attempt after `cursor`.

        If its supervisor is gone: the frames that its spools still hold, and an outcome once
        every process of it is seen dead.
        """

    async def send(self, ref: AttemptRef, command: Command) -> None:
        """Pass a command on to an attempt; nothing happens if its supervisor is gone. Its
        effects are reported by `poll`. Harmless to repeat: those of one `name` are one command."""

    async def acknowledge(self, ref: AttemptRef) -> None:
        """The outcome is stored: forget the attempt. Harmless to repeat."""

    async def attempts(self) -> list[AttemptRef]:
        """Every attempt of this deployment that the cluster still knows."""

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        """Ask Ray's autoscaler for a cluster that would have room for all these bundles were it
        empty, each so many times, on nodes with their labels; for none, to leave the size to it.

        End dray's own processes on the released nodes, with which Ray would never find these idle;
        a node that a later call does not name gets them again. Harmless to repeat.
        """

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        """How far a node is with what a job needs there; begins with it if nobody has. Harmless to
        repeat."""

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        """No job of the owner waits for these needs on a node any more: end what is prepared there
        for them alone. Harmless to repeat."""

    async def kept_jobs(self) -> list[str]:
        """Jobs whose working directory is on a node."""

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        """These jobs were deleted: delete their working directories on every node that answers.
        Harmless to repeat."""
