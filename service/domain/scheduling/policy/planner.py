"""The scheduling policy: which jobs start where, why the others wait, who makes room, who grows.

A gang starts whole or not at all; an elastic one also with fewer workers, from its least number
on. Jobs are considered in the order of `order`: by priority, then by the work that they have left.
A job that finds no free slots has running jobs leave that come clearly behind it (`eviction`).

A job that can't start yet reserves all that it could ever use: on each node, as many of its
workers' bundles as fit there when the node is empty are set aside, and jobs behind it may take only
the rest. So a small job never delays a large one that came first, yet passes it on capacity that
the large one has no use for, such as nodes of another kind. A job that would leave its slots when
it is asked to passes also on reserved ones, while the other has not waited for long: it can be
pushed out again. So does one whose running time is limited, if it surely ends before the other can
start (`backfill`).

Elastic jobs that report how long their steps take get the size at which the cluster gains most by
them (`sizing`): those that run on other sizes grow, give slots back, or leave and resume.

Running groups get more slots at both ends of the queue. Before the queue: a group that lost slots
and lacks workers to train on. It was given its slots before any job that waits now, it holds the
rest of them, and it stands by for no more than half a minute. So it gets any free slot, also one
that a waiting job has reserved, and slots that it can't have yet are set aside as for a job ahead
of all others. Such groups are served by priority, then first come first served. After the queue: an
elastic group that trains below its size gets slots that no waiting job has reserved, by priority,
then first come first served. Here jobs that back off reserve slots, too: a job that starts before
them ends some day, but a group keeps what it has grown into.

A job that backs off reserves nothing before the queue has been served, unless it is tried again
soon: it was not at fault, as one whose node was lost, and keeps its place.

A job that is held, that the limits of its queue keep back (`limits`), that waits for others to end,
or whose array runs as many jobs as it may, reserves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from service.config.node_types import OPEN
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.gangs import Gangs
from service.domain.scheduling.placement.slots import WHOLE_GPUS, Node
from service.domain.scheduling.policy.ranking import Ranking, at_the_front
from service.domain.scheduling.policy.records import Decision, Growing, Snapshot, Stay, Wait
from service.domain.scheduling.policy.round import Round, waits_for_jobs
from service.domain.scheduling.rules.limits import HELD, held_message
from service.domain.scheduling.rules.obstacles import Reason

OnError = Callable[[str, Exception], None]
"""Called with a job that can't be planned, and why."""


def plan(
    snapshot: Snapshot, now: datetime, *, on_error: OnError = lambda job_id, error: None
) -> list[Decision]:
    """One decision for each waiting job, in the order of the queue, those that are held at its end;
    then one for each group that could grow, and one for each job that is to leave its slots.

    A job for which a rule raises an error waits as `not_planned`, and the others are planned
    nevertheless.
    """
    accepted = sorted((node for node in snapshot.nodes if node.accepted), key=lambda n: n.id)
    gangs = Gangs(slots.total_of(node.total for node in accepted))
    snapshot, unsound = _without_unsound(snapshot, gangs, on_error)
    of_queue = [gangs.of(job.request) for job in snapshot.queue]
    for group in snapshot.growing:
        gangs.of(group.request)
    for job in snapshot.running:
        if job.job_id in snapshot.elastic:
            gangs.of(job.request)
    gangs.name_all(
        shares_gpus=any(WHOLE_GPUS in node.available_to_us for node in accepted),
        has_closed=any(OPEN in node.total for node in accepted),
    )
    ranking = Ranking(snapshot, gangs, now)
    ranks = [ranking.rank(job, gang) for job, gang in zip(snapshot.queue, of_queue, strict=True)]
    running = {j.job_id: ranking.rank(j, gangs.of(j.request)) for j in snapshot.running}
    # Sorted are indices, and no pairs: a collector of garbage goes through all that is made here.
    queue = [at for at, job in enumerate(snapshot.queue) if job.held is None]
    if any(job.place for job in snapshot.queue) or any(job.place for job in snapshot.running):
        ranks, running = at_the_front(snapshot, ranks, running)
        # Jobs of one place have the same rank, that of the first job that they pass.
        queue.sort(key=lambda at: snapshot.queue[at].seq)
    queue.sort(key=ranks.__getitem__)
    round_ = Round(accepted if snapshot.connected else (), snapshot, gangs, running, now)
    held = [job for job in snapshot.queue if job.held is not None]
    kept = [Wait(j.job_id, Reason(HELD, held_message(j.held or "", j.job_id)), None) for j in held]
    obstacle = _nothing_starts(snapshot, accepted)
    if obstacle is None and snapshot.elastic:
        waiting = [(snapshot.queue[at], of_queue[at], ranks[at]) for at in queue]
        try:
            round_.departures.choose_sizes(waiting, now)
        except Exception as error:  # then elastic jobs start at the sizes that fit
            on_error("elastic jobs", error)

    def not_planned(job_id: str, error: Exception) -> Reason:
        on_error(job_id, error)
        return _not_planned(error)

    def of_group(decide: Callable[[Growing], Decision], group: Growing) -> Decision:
        try:
            return decide(group)
        except Exception as error:
            return Stay(group.job_id, not_planned(group.job_id, error))

    groups = sorted(snapshot.growing, key=lambda group: (-group.priority, group.seq))
    if obstacle is not None and not (snapshot.connected and accepted):
        standing_by: list[Decision] = [
            Stay(group.job_id, obstacle) for group in groups if group.lacking
        ]
    else:
        standing_by = [of_group(round_.serve, group) for group in groups if group.lacking]
    if obstacle is not None:
        round_.explain(not_planned)
        waits = [
            waits_for_jobs(job, position) if job.after else Wait(job.job_id, obstacle, position)
            for position, job in enumerate([snapshot.queue[at] for at in queue], 1)
        ]
        others = [Stay(g.job_id, obstacle) for g in groups if not g.lacking]
        return [*waits, *kept, *unsound, *standing_by, *others]
    decisions: list[Decision] = []
    position = 1
    for at in queue:
        decision: Decision
        try:
            decision = round_.decide(snapshot.queue[at], of_queue[at], ranks[at], position)
        except Exception as error:  # slots that it took are free again in the next plan
            name = snapshot.queue[at].job_id
            decision = Wait(name, not_planned(name, error), position)
        position += isinstance(decision, Wait)
        decisions.append(decision)
    round_.end_queue()
    grown = [of_group(round_.grow, group) for group in groups if not group.lacking]
    round_.explain(not_planned)
    return [*decisions, *kept, *unsound, *standing_by, *grown, *round_.departures.asked]


def _without_unsound(
    snapshot: Snapshot, gangs: Gangs, on_error: OnError
) -> tuple[Snapshot, list[Wait]]:
    """The snapshot without the waiting jobs whose requests raise errors, and these jobs' waits."""
    sound, unsound = [], []
    for job in snapshot.queue:
        try:
            gangs.of(job.request)
            sound.append(job)
        except Exception as error:
            on_error(job.job_id, error)
            unsound.append(Wait(job.job_id, _not_planned(error), None))
    return (replace(snapshot, queue=tuple(sound)) if unsound else snapshot), unsound


def _not_planned(error: Exception) -> Reason:
    kind = type(error).__name__
    message = f"can't be planned: the scheduler has an error ({kind}), which its log shows"
    return Reason("not_planned", f"{message}; it is tried again in each round")


def _nothing_starts(snapshot: Snapshot, accepted: Sequence[Node]) -> Reason | None:
    if not snapshot.connected:
        return Reason("cluster_unavailable", "waits for the Ray cluster, which does not answer")
    may_come = bool(snapshot.to_come)
    starting = sum(node.is_starting for node in snapshot.nodes)
    if starting and not accepted and not may_come:
        number = slots.number_of_nodes(starting)
        return Reason("no_nodes", f"waits for a node: dray's agent starts on {number}")
    if snapshot.nodes and not accepted and not may_come:
        return Reason("no_nodes", "waits for a node: every node of the cluster is refused")
    if not accepted and not may_come:
        return Reason("no_nodes", "waits for a node: the cluster has none")
    if snapshot.storage_problem is not None:
        return Reason("storage_full", f"waits for room: {snapshot.storage_problem}")
    return None
