"""The order in which the policy considers the waiting jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from service.config.node_types import OPEN
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.gangs import Gang, Gangs
from service.domain.scheduling.placement.slots import WHOLE_GPUS, Node
from service.domain.scheduling.policy.emptied import Emptied
from service.domain.scheduling.policy.ranking import Ranking, at_the_front
from service.domain.scheduling.policy.records import Snapshot, Wait
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules.lending import Lending
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.order import Rank
from service.domain.scheduling.rules.tree import QueueTree

OnError = Callable[[str, Exception], None]
"""Called with the id of each job that can't be planned, and the error."""


@dataclass(frozen=True)
class QueueOrder:
    """The order of the jobs of a snapshot."""

    snapshot: Snapshot
    """The snapshot without waiting jobs whose requests raise errors, and with the effects of
    reservations on requests and nodes."""
    windows: Windows
    unsound: Sequence[Wait]
    """The decisions for the omitted jobs."""
    accepted: Sequence[Node]
    gangs: Gangs
    emptied: Emptied
    ranking: Ranking
    of_queue: Sequence[Gang]
    """The gang of each waiting job. This list and the two following lists have the same indices as
    the queue of `snapshot`."""
    own_ranks: Sequence[Rank]
    """The ranks that the waiting jobs would have if no job had been moved to the front."""
    ranks: Sequence[Rank]
    running: dict[str, Rank]
    """The rank of each running job."""
    queue: Sequence[int]
    """The indices of the waiting jobs that are not held, in the order in which the policy considers
    them."""


def in_order(snapshot: Snapshot, now: datetime, on_error: OnError) -> QueueOrder:
    """Return the order of the snapshot's jobs."""
    windows = Windows(snapshot, now)
    snapshot = windows.apply()
    accepted = sorted((node for node in snapshot.nodes if node.accepted), key=lambda n: n.id)
    gangs = Gangs(slots.total_of(node.total for node in accepted))
    snapshot, of_queue, unsound = _without_unsound(snapshot, gangs, on_error)
    for group in snapshot.growing:
        gangs.of(group.request)
    for job in snapshot.running:
        if job.job_id in snapshot.elastic:
            gangs.of(job.request)
    gangs.name_all(
        shares_gpus=any(WHOLE_GPUS in node.available_to_us for node in accepted),
        has_closed=any(OPEN in node.total for node in accepted),
    )
    emptied = Emptied(snapshot, gangs)
    tree = QueueTree(snapshot.queues)
    lending = Lending(tree, windows.lendable()) if tree.lent else None
    ranking = Ranking(snapshot, gangs, emptied, now, lending)
    own = [ranking.rank(job, gang) for job, gang in zip(snapshot.queue, of_queue, strict=True)]
    ranks, running = own, {j.job_id: ranking.rank(j, gangs.of(j.request)) for j in snapshot.running}
    # Sort indices instead of pairs, to create fewer objects that the garbage collector must visit.
    queue = [at for at, job in enumerate(snapshot.queue) if job.held is None]
    if any(job.place for job in snapshot.queue) or any(job.place for job in snapshot.running):
        ranks, running = at_the_front(snapshot, own, running)
        # Jobs that were moved to the same `place` have equal ranks, so sort the jobs by `seq`
        # first.
        queue.sort(key=lambda at: snapshot.queue[at].seq)
    queue.sort(key=ranks.__getitem__)
    return QueueOrder(
        *(snapshot, windows, unsound, accepted, gangs, emptied, ranking),
        *(of_queue, own, ranks, running, queue),
    )


def _without_unsound(
    snapshot: Snapshot, gangs: Gangs, on_error: OnError
) -> tuple[Snapshot, list[Gang], list[Wait]]:
    """Return three values: a snapshot without the waiting jobs whose requests raise errors, the
    gangs of its waiting jobs, and the decisions for the omitted jobs."""
    of_queue: list[Gang] = []
    unsound: dict[str, Wait] = {}
    for job in snapshot.queue:
        try:
            of_queue.append(gangs.of(job.request))
        except Exception as error:
            on_error(job.job_id, error)
            unsound[job.job_id] = Wait(job.job_id, not_planned_reason(error), None)
    if unsound:
        sound = tuple([job for job in snapshot.queue if job.job_id not in unsound])
        snapshot = replace(snapshot, queue=sound)
    return snapshot, of_queue, list(unsound.values())


def not_planned_reason(error: Exception) -> Reason:
    kind = type(error).__name__
    message = f"can't be planned because of an internal error ({kind}); see the service's log"
    return Reason("not_planned", f"{message}. Planning is retried in each scheduling round")
