"""The last snapshot of the cluster, and the jobs on each node, from the database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from dray import views
from service.config.node_types import without_labels
from service.config.settings import Settings
from service.db.models import NodeRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import storage as storage_repository
from service.db.repositories.scheduling import cluster as repository
from service.db.repositories.scheduling import reservations as reservations_repository
from service.domain.scheduling import policy
from service.domain.scheduling.placement import slots
from service.lifecycle import resizing
from service.nodes import checks, quarantine, withheld
from service.queues import reservations

SOON = timedelta(weeks=1)
"""Reservations that begin later are not shown."""


def cluster(
    session: Session, settings: Settings, *, user: str | None, now: datetime
) -> views.Cluster:
    """Return the cluster, with the reservations that concern the user, or all reservations if
    `user` is None."""
    row = repository.get(session)
    storage, autoscaling = _storage_state(session, settings), _autoscaling(session, settings)
    if row is None:
        return views.Cluster(
            connected=False,
            reason="not seen yet",
            nodes=[],
            storage=storage,
            autoscaling=autoscaling,
        )
    return views.Cluster(
        connected=row.connected,
        reason=row.reason,
        ray_address=row.ray_address,
        ray_dashboard=row.ray_dashboard,
        nodes=_nodes(session, user, now),
        storage=storage,
        autoscaling=autoscaling,
        updated_at=row.updated_at,
    )


def _autoscaling(session: Session, settings: Settings) -> views.AutoscalingState | None:
    types = settings.autoscale_nodes
    if not types:
        return None
    row = repository.autoscaling(session)
    return views.AutoscalingState(
        max_nodes=sum(each.most for each in types),
        num_nodes=row.num_nodes if row else 0,
        asked_at=row and row.asked_at,
    )


def _storage_state(session: Session, settings: Settings) -> views.StorageState:
    row = storage_repository.state(session)
    return views.StorageState(
        used_bytes=row and row.used_bytes,
        quota_bytes=settings.storage_quota_bytes,
        free_bytes=row and row.free_bytes,
        min_free_bytes=settings.min_free_bytes,
        problem=row and row.problem,
    )


def _nodes(session: Session, user: str | None, now: datetime) -> list[views.NodeSlots]:
    rows = repository.nodes(session)
    reserved = _reserved(session, rows, user, now)
    faults, tests = withheld.by_hostname(session), checks.by_hostname(session)
    live = attempts_repository.live(session)
    holders = [
        policy.Holder(
            row.job_id,
            resizing.as_slices(row.slices),
            row.bundle,
            roles=resizing.as_roles(row.roles),
        )
        for row in live
    ]
    held = slots.held_by_node(holders)
    jobs: dict[str, dict[str, None]] = {}
    for holder in holders:
        for part in holder.slices:
            jobs.setdefault(part.node_id, {})[holder.job_id] = None
    return [
        views.NodeSlots(
            node_id=node.node_id,
            hostname=node.hostname,
            alive=node.alive,
            resources=node.total,
            labels=node.labels,
            held=without_labels(held.get(node.node_id, {})),
            accepted=node.accepted,
            reason=node.reason,
            quarantined=quarantine.as_viewed(node.quarantined),
            withheld=withheld.as_viewed(faults.get(node.hostname, ())),
            check=tests.get(node.hostname),
            reservations=reserved[node.node_id],
            jobs=list(jobs.get(node.node_id, ())),
        )
        for node in rows
    ]


def _reserved(
    session: Session, rows: Sequence[NodeRow], user: str | None, now: datetime
) -> dict[str, list[views.NodeReservation]]:
    """For each node, return its reservations that the user can see, keyed by the node's id."""
    ids_of, nodes = reservations.by_name(rows), reservations.as_nodes(rows)
    found: dict[str, list[views.NodeReservation]] = {node.id: [] for node in nodes}
    for rules in reservations_repository.unfinished(session, now):
        if rules.begins_at > now + SOON or not reservations.concerns(rules, user):
            continue
        reservation = rules.reservation(ids_of)
        view = views.NodeReservation(
            name=rules.name,
            begins_at=rules.begins_at,
            ends_at=rules.ends_at,
            maintenance=reservation.is_maintenance,
            users=list(rules.users),
            queues=list(rules.queues),
            projects=list(rules.projects),
        )
        for node in nodes:
            if reservation.holds(node):
                found[node.id].append(view)
    return found
