"""The nodes of the cluster as the plan sees them: what of each may be taken now."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from service.cluster.port import ClusterNode, ClusterSnapshot
from service.domain.scheduling import policy
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.nodes import quarantine


class SeenNodes:
    """Remembers, of the newest snapshot of the cluster, its sum and the nodes of which nothing is
    held: they are the same from round to round. Belongs to one loop."""

    def __init__(self) -> None:
        self._cluster: ClusterSnapshot | None = None
        self._total: Mapping[str, float] = {}
        self._unheld: dict[str, policy.Node] = {}

    def total(self, cluster: ClusterSnapshot | None) -> Mapping[str, float]:
        """The sum of the resources of the accepted nodes."""
        self._look_at(cluster)
        return self._total

    def of(
        self,
        cluster: ClusterSnapshot,
        holders: Sequence[policy.Holder],
        alive: Collection[tuple[str, int]],
        *,
        shares_gpus: bool,
    ) -> tuple[policy.Node, ...]:
        """alive: attempts whose slots are among those of the holders."""
        self._look_at(cluster)
        held_by_node = slots.held_by_node(holders)
        nodes = []
        for node in cluster.nodes:
            ours = held_by_node.get(node.node_id, {})
            shared = shares_gpus and bool(node.resources.get("GPU"))
            if ours or node.quarantined or shared:
                parts = parts_on(node.node_id, holders) if shared else None
                nodes.append(_seen(node, cluster, ours, alive, parts))
                continue
            if node.node_id not in self._unheld:
                self._unheld[node.node_id] = _seen(node, cluster, {}, alive, None)
            nodes.append(self._unheld[node.node_id])
        return tuple(nodes)

    def _look_at(self, cluster: ClusterSnapshot | None) -> None:
        if cluster is not self._cluster:
            nodes = () if cluster is None else cluster.nodes
            self._total = slots.total_of(node.resources for node in nodes if node.accepted)
            self._cluster, self._unheld = cluster, {}


def _seen(
    node: ClusterNode,
    cluster: ClusterSnapshot,
    ours: Mapping[str, float],
    alive: Collection[tuple[str, int]],
    parts: Sequence[tuple[float, int]] | None,
) -> policy.Node:
    """ours: what our attempts hold there. parts: of its GPUs, by holder; None if none
    is shared."""
    # Where nobody else takes slots our own books are exact, and Ray's lag behind.
    available = node.available if cluster.shared else node.resources
    stuck = node.quarantined or ()
    # Those of an attempt that lives are among the slots that it holds.
    held = quarantine.with_kept(ours, [e for e in stuck if (e.job_id, e.attempt) not in alive])
    free = slots.offered(node.resources, available, held)
    if parts is not None:
        free = with_shared_gpus(free, parts)
    kept = quarantine.with_kept({}, stuck)
    seen = (node.node_id, node.resources, free)
    return policy.Node.labelled(
        *(*seen, node.labels),
        accepted=node.accepted,
        quarantined=kept,
        is_starting=node.is_starting,
    )
