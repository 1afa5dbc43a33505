"""The nodes of the cluster for the plan, with the currently free slots of each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.cluster.port import ClusterNode, ClusterSnapshot
from service.domain.scheduling import policy
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.shared_gpus import (
    Parts,
    parts_on,
    sharing,
    with_shared_gpus,
)
from service.domain.scheduling.placement.slots import NUM_GPUS, WHOLE_GPUS, count, is_part_of_gpu
from service.lifecycle import node_checks
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.nodes import quarantine, withheld

RAY_LAGS = timedelta(seconds=5)
"""Maximum time for which Ray might still show slots as taken after an attempt has released them."""


class SeenNodes(Stage):
    """Adds the nodes to the snapshot. The total resources, and nodes without held slots, are cached
    as long as the cluster's snapshot is the same. Each instance must be used in a single event
    loop."""

    def __init__(self) -> None:
        self._cluster: ClusterSnapshot | None = None
        self._total: Mapping[str, float] = {}
        self._unheld: dict[str, policy.Node] = {}

    def look(self, session: Session, seen: SchedulerRound) -> None:
        cluster, live, snapshot = seen.cluster, seen.live, seen.snapshot
        seen.total = self.total(cluster)
        if cluster is None:
            return
        bundles = (*(job.request.bundle for job in snapshot.queue), *(a.bundle for a in live))
        shares_gpus = any(map(is_part_of_gpu, bundles))
        alive = {(attempt.job_id, attempt.attempt) for attempt in live}
        faults = withheld.by_hostname(session)
        here = [attempt for attempt in live if attempt.cluster_session == cluster.session]
        seen.snapshot = replace(
            snapshot,
            nodes=self.of(
                cluster,
                snapshot.holders,
                alive,
                shares_gpus=shares_gpus,
                withheld_hosts=faults.keys(),
                tested_hosts=node_checks.hosts_without_work(session),
                faulty_cpus={host for host in faults if withheld.has_faulty_cpu(faults[host])},
            ),
            growing=tuple(a.growing for a in here if a.growing is not None),
            running=tuple(a.running for a in here if a.running is not None),
            running_of_arrays=Counter(a.array_id for a in live if a.array_id is not None),
        )

    def total(self, cluster: ClusterSnapshot | None) -> Mapping[str, float]:
        """Return the total resources of the accepted nodes."""
        self._look_at(cluster)
        return self._total

    def of(
        self,
        cluster: ClusterSnapshot,
        holders: Sequence[policy.Holder],
        alive: Collection[tuple[str, int]],
        *,
        shares_gpus: bool,
        withheld_hosts: Collection[str] = (),
        tested_hosts: Collection[str] = (),
        faulty_cpus: Collection[str] = (),
    ) -> tuple[policy.Node, ...]:
        """Return the nodes for the plan. `alive` contains the attempts whose slots are included in
        the holders. `withheld_hosts` are hosts that have faults, `tested_hosts` are hosts that
        get no work because of a self-test, and `faulty_cpus` are hosts with faults of their CPUs.
        """
        self._look_at(cluster)
        held_by_node = slots.held_by_node(holders)
        sharing_on = sharing(holders if shares_gpus else ())
        nodes = []
        for node in cluster.nodes:
            ours = held_by_node.get(node.node_id, {})
            shared = shares_gpus and bool(node.resources.get("GPU"))
            is_sick = node.hostname in withheld_hosts
            is_withheld = is_sick or node.hostname in tested_hosts
            if ours or node.quarantined or shared or is_withheld:
                parts = parts_on(node.node_id, sharing_on.get(node.node_id, ())) if shared else None
                seen = _seen(node, cluster, ours, alive, parts)
                if is_withheld:
                    after_test = None if is_sick else seen.available_to_us
                    seen = _withheld(seen, node.hostname, node.hostname in faulty_cpus)
                    seen = replace(seen, after_test=after_test)
                nodes.append(seen)
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


class LeftSlots(Stage):
    """Prevents further preemptions while a shared Ray cluster might still show freed slots as
    taken."""

    def __init__(self) -> None:
        self._held: Mapping[tuple[str, int], int] = {}
        """Number of slots that each attempt held in the last round."""
        self._left_at: datetime | None = None

    def look(self, session: Session, seen: SchedulerRound) -> None:
        if seen.cluster is None or not seen.cluster.shared:
            return
        holding = {(a.job_id, a.attempt): count(a.slices) for a in seen.live}
        if any(holding.get(key, 0) < number for key, number in self._held.items()):
            self._left_at = seen.now
        self._held = holding
        if self._left_at is None or seen.now - self._left_at >= RAY_LAGS:
            return
        seen.snapshot = replace(seen.snapshot, slots_lag=True)


def _withheld(node: policy.Node, hostname: str, is_cpu_faulty: bool) -> policy.Node:
    """Return the node without free GPUs, or without free CPUs if it has no GPU or if its CPUs are
    faulty."""
    kept = withheld.resources_of(node.total, is_cpu_faulty=is_cpu_faulty)
    free = {**node.available_to_us, **dict.fromkeys(kept, 0.0)}
    free |= {name: 0 for name in (NUM_GPUS, WHOLE_GPUS) if name in free}
    taken = {**node.quarantined, **kept}
    return replace(node, available_to_us=free, quarantined=taken, withheld=(hostname, *kept))


def _seen(
    node: ClusterNode,
    cluster: ClusterSnapshot,
    ours: Mapping[str, float],
    alive: Collection[tuple[str, int]],
    parts: Parts | None,
) -> policy.Node:
    """Convert the cluster's node to a `policy.Node` for the plan.

    `ours` contains the resources that dray's attempts hold on the node. `parts` contains the
    fractions of the node's GPUs that each job holds; None if no GPU is shared.
    """
    # If only dray uses the cluster, ignore `available`: dray's own records are exact, whereas Ray's
    # records lag behind.
    available = node.available if cluster.shared else node.resources
    stuck = node.quarantined or ()
    # Skip the quarantined slots of live attempts, because `ours` already includes these slots.
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
