"""The stored snapshot of the cluster: its nodes, and the kinds of GPU that a job can get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from dray.spec import JobSpec
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.memory_limit import COPIES_SHARE
from service.cluster.port import DRAINED, ClusterSnapshot
from service.config.node_types import SILO_LABEL, NodeType
from service.db.models import ClusterRow, NodeRow
from service.db.repositories import surroundings
from service.db.repositories.scheduling import cluster as repository
from service.domain.errors import Unsatisfiable
from service.domain.scheduling import autoscaling, policy
from service.domain.scheduling.placement.slots import is_open
from service.lifecycle import node_checks
from service.nodes import quarantine, withheld

KIND = "accelerator_type:"
"""Prefix of the Ray resource that states the kind of a node's GPUs."""
COPIES = "memory for copies of the state"
"""Name of a resource that only `with_memory_for_copies` adds to nodes, in bytes."""
WITHOUT_BF16 = frozenset({"K80", "M60", "P4", "P100", "V100", "T4"})
"""GPUs with a compute capability below 8.0, identified by Ray's names (`ray.util.accelerators`)."""


def store(
    session: Session, snapshot: ClusterSnapshot | None, problem: str | None, now: datetime
) -> None:
    """Store the latest snapshot.

    Without a snapshot, the rows of the nodes are left unchanged, and the cluster is marked as not
    connected. The dashboard's address is removed, because it can differ after Ray restarts.
    """
    before = repository.get(session)
    session_before = before and before.session  # `before` is overwritten in place
    repository.put(
        session,
        ClusterRow(
            id=repository.THE_CLUSTER,
            connected=snapshot is not None,
            reason=_clean(problem),
            ray_address=snapshot.address if snapshot else before and before.ray_address,
            ray_dashboard=snapshot.dashboard_url if snapshot else None,
            session=snapshot.session if snapshot else before and before.session,
            updated_at=now,
        ),
    )
    if snapshot is None:
        return
    # Because the cluster's row is written first, other processes that store a snapshot must wait.
    before_nodes = repository.nodes(session)
    kept_before = {row.node_id: row.quarantined for row in before_nodes}
    kept = quarantine.as_stored(snapshot.nodes, kept_before)
    quarantine.add_events(
        session, kept_before, kept, {n.node_id: n.hostname for n in snapshot.nodes}, now
    )
    withheld.store_reports(session, snapshot.nodes, now)
    if session_before == snapshot.session:
        node_checks.nodes_lost(session, _lost(before_nodes, snapshot), now)
    repository.replace_nodes(
        session,
        [
            NodeRow(
                node_id=node.node_id,
                hostname=node.hostname,
                alive=node.alive,
                accepted=node.accepted,
                reason=_clean(node.problem or node.full) or _why_closed(node.labels),
                total=dict(node.resources),
                available=dict(node.available),
                labels=dict(node.labels),
                quarantined=kept[node.node_id],
                memory_bytes=node.memory_bytes,
                updated_at=now,
            )
            for node in snapshot.nodes
        ],
    )


def _lost(before: Sequence[NodeRow], snapshot: ClusterSnapshot) -> dict[str, str]:
    """Return the host names of the nodes that have disappeared, keyed by node id, except for nodes
    that Ray was asked to remove. A lost node often stops being accepted before Ray declares it
    dead, because its agent doesn't respond."""
    present = {node.hostname for node in snapshot.nodes}
    gone = (
        row
        for row in before
        if row.hostname not in present and not (row.reason or "").startswith(DRAINED)
    )
    return {row.node_id: row.hostname for row in gone}


def _why_closed(labels: Mapping[str, str]) -> str | None:
    return (
        "the node has a silo's data, and runs only ranks of silos" if SILO_LABEL in labels else None
    )


def _clean(message: str | None) -> str | None:
    """Make a message from Ray or a node's agent safe to store in a database."""
    return message and clean(message)


def usable(session: Session, types: Sequence[NodeType] = ()) -> tuple[policy.Node, ...] | None:
    """Return the nodes that can run ranks, and the nodes of the given types that may be added.
    Return None if there are no such nodes."""
    cluster = repository.get(session)
    if cluster is None or not cluster.connected:
        return None
    nodes = tuple(
        policy.Node.labelled(row.node_id, row.total, row.available, row.labels)
        for row in repository.nodes(session)
        if row.alive and row.accepted
    )
    return _unless_refused(session, (*nodes, *autoscaling.may_come(types, nodes)))


def with_memory_for_copies(session: Session) -> tuple[policy.Node, ...] | None:
    """Return all live nodes, accepted or not, with the memory that copies of a model's state may
    use as the resource `COPIES`. None if the memory of any of them is unknown, or if no node is
    known."""
    rows = [row for row in repository.nodes(session) if row.alive]
    if not surroundings.seen(session).connected or not rows:
        return None
    nodes = []
    for row in rows:
        if row.memory_bytes is None:
            return None
        total = {**row.total, COPIES: COPIES_SHARE * row.memory_bytes}
        nodes.append(policy.Node.labelled(row.node_id, total, total, row.labels))
    return tuple(nodes)


def _unless_refused(
    session: Session, nodes: tuple[policy.Node, ...]
) -> tuple[policy.Node, ...] | None:
    """Return `nodes`, or None if it is unknown which nodes jobs can use. This is the case if there
    are no nodes, or if all nodes accept only ranks of silos and other nodes of the cluster are
    currently refused."""
    if any(is_open(node.total) for node in nodes):
        return nodes
    refused = (row for row in repository.nodes(session) if row.alive and not row.accepted)
    return None if any(SILO_LABEL not in row.labels for row in refused) else nodes or None


def totals(session: Session, types: Sequence[NodeType] = ()) -> tuple[policy.Node, ...] | None:
    """Like `usable`, but if `types` is empty, treat all nodes as unoccupied, and omit their
    names."""
    if types:
        return usable(session, types)
    if not surroundings.seen(session).connected:
        return None
    found: list[policy.Node] = []
    for total, is_silo, number in repository.usable_totals(session):
        labels = {SILO_LABEL: "true"} if is_silo else {}
        found += [policy.Node.labelled("", total, total, labels)] * number
    return _unless_refused(session, tuple(found))


def kinds(session: Session, spec: JobSpec) -> set[str | None]:
    """Return the kind of GPU that the job names, or all kinds in the cluster if the job names none.
    None stands for an unknown kind."""
    if spec.resources.accelerator is not None:
        return {spec.resources.accelerator}
    found: set[str | None] = set()
    for node in usable(session) or ():
        if node.total.get("GPU", 0):
            own = {name.removeprefix(KIND) for name in node.total if name.startswith(KIND)}
            found |= {name for name in own if not _has_more_exact(name, own)} or {None}
    return found


def _has_more_exact(name: str, names: set[str]) -> bool:
    """Whether `names` has a longer form of `name`, such as the operator's `A100-80G` for `A100`."""
    return any(other.startswith(f"{name}-") for other in names)


def refuse_missing_precision(session: Session, spec: JobSpec) -> None:
    """Raise Unsatisfiable if the job could get a GPU that does not support its precision."""
    if not spec.resources.gpus_per_worker or spec.train.precision != "bf16":
        return
    found = kinds(session, spec)
    without = found & WITHOUT_BF16
    if without:
        named = " or ".join(sorted(str(kind) for kind in without))
        others = sorted(str(kind) for kind in found - without if kind)
        newer = " or ".join(others) if others else "a newer GPU"
        gathered = spec.parallel.param_dtype == "bf16"
        fields = "train.precision" + (" and parallel.param_dtype" if gathered else "")
        raise Unsatisfiable(
            f"train.precision is bf16, which a {named} does not support, and the job might be "
            "placed on one",
            pointer="/train/precision",
            hint=f"set {fields} to fp16, or request {newer} with resources.accelerator",
        )
