"""The stage that adds reservations to the snapshot, and chooses nodes for reservations of a number
of nodes or GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

from service.cluster.port import ClusterSnapshot
from service.db.repositories.scheduling import reservations as repository
from service.db.session import touch
from service.domain.scheduling import policy
from service.domain.scheduling.rules.reservations import LEAVING_S, ReservationRules, choose
from service.domain.scheduling.rules.tree import QueueTree
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.term import LoopContext

NEVER = datetime(9999, 1, 1, tzinfo=UTC)


class ReservedNodes(Stage):
    """Adds the reservations that have not ended. Nodes that were chosen for a reservation are
    stored, so that they stay the same after a restart."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._leave_s = context.settings.preempt_grace_s + LEAVING_S
        self._changed: Sequence[tuple[ReservationRules, tuple[str, ...]]] = ()

    def look(self, session: Session, seen: SchedulerRound) -> None:
        rules = repository.unfinished(session, seen.now)
        self._changed = ()
        if not rules:
            return
        if seen.cluster is not None and any(each.is_counted for each in rules):
            chosen = _choose(rules, seen.cluster, seen.snapshot, seen.now)
            self._changed = [
                (each, chosen[each.name])
                for each in rules
                if each.is_counted and chosen[each.name] != each.chosen
            ]
            rules = [replace(each, chosen=chosen.get(each.name, ())) for each in rules]
        ids_of = {} if seen.cluster is None else _ids_of(seen.cluster)
        tree = QueueTree(seen.snapshot.queues)
        reservations = tuple(each.reservation(ids_of, tree) for each in rules)
        seen.snapshot = replace(seen.snapshot, reservations=reservations, leave_s=self._leave_s)

    async def before(self, seen: SchedulerRound) -> None:
        changed = self._changed

        def work(session: Session, _: datetime) -> None:
            touch(session)
            for each, node_ids in changed:
                repository.choose(session, each, node_ids)

        if changed:
            await self._database.write(work)


def _ids_of(cluster: ClusterSnapshot) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in cluster.nodes:
        for name in (node.hostname, node.node_id):
            found.setdefault(name, set()).add(node.node_id)
    return found


def _choose(
    rules: Sequence[ReservationRules],
    cluster: ClusterSnapshot,
    snapshot: policy.Snapshot,
    now: datetime,
) -> Mapping[str, tuple[str, ...]]:
    nodes = [
        policy.Node.labelled(n.node_id, n.resources, n.available, n.labels, accepted=n.accepted)
        for n in cluster.nodes
        if n.alive and n.drained_by is None and not n.is_released
    ]
    busy_until: dict[str, datetime] = {}
    for job in snapshot.running:
        ends_at = NEVER
        if job.yields:
            ends_at = now
        elif job.ends_within_s is not None:
            ends_at = min(NEVER, now + timedelta(seconds=job.ends_within_s))
        for part in job.slices:
            busy_until[part.node_id] = max(ends_at, busy_until.get(part.node_id, now))
    ids_of = _ids_of(cluster)
    fixed = [each.reservation(ids_of) for each in rules if not each.is_counted]
    counted = [each for each in rules if each.is_counted]
    return choose(counted, fixed, nodes, busy_until)
