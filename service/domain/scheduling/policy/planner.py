"""The scheduling policy. It decides which jobs start (and on which nodes), wait, release slots or
grow, and gives the reasons.

A gang starts completely or not at all. An elastic gang can also start with fewer workers, down to
its minimum. Jobs are considered in the order defined by `order`: by priority, then by remaining
work. If there are no free slots for a job, running jobs that rank clearly behind it are asked to
release their slots (`eviction`).

Among the jobs that fit once all running jobs have ended, the first job that can't start reserves
the slots that are expected to be free earliest as running jobs end (`backfill`). Later jobs can
take all other slots. A job with a limited runtime can even start on the reserved slots: it must end
before the time limits of the running jobs for which the job with the reservation waits. Unless the
job with the reservation is overdue (`order`), a job that releases its slots on request can also use
the reserved slots, since it can be evicted again.

Elastic jobs that report step times get the sizes that maximize the total gain of all these jobs
(`sizing`). A running job whose size differs from the chosen size grows, releases some of its
slots, or releases all of them and resumes later.

Running groups can get more slots both before and after the queue is served. Groups that lost slots
and have too few workers to continue training are served before the queue. Such a group had its
slots before any waiting job, still holds its other slots, and waits for at most half a minute. It
can therefore get any free slot, even a slot that a waiting job has reserved; if too few slots are
free, slots are set aside for it as for the first job of the queue. After the queue has been served,
elastic groups that train below their full size get slots that no waiting job has reserved. Before
these groups are served, slots are also reserved for jobs that back off. Other jobs that took such
slots would release them when they end, but a group would keep them. Groups are served by priority;
groups with the same priority are served first come, first served.

A job that backs off reserves nothing until the queue has been served. The exception is a job that
will be retried soon, which keeps its position, because it did not cause its failure (for example, a
node was lost).

A job reserves nothing if it is held, is blocked by the limits of its queue (`limits`), belongs to
an array that already runs its maximum number of jobs, or waits for its begin time, its reservation
or the end of other jobs. Jobs don't start on nodes that are reserved for other jobs, and leave such
nodes before the reservation begins (`windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from service.domain.scheduling.placement.phrases import number_of_nodes
from service.domain.scheduling.placement.slots import Node
from service.domain.scheduling.policy.ordering import OnError, in_order, not_planned_reason
from service.domain.scheduling.policy.ranking import too_early
from service.domain.scheduling.policy.records import Decision, Growing, Snapshot, Stay, Wait
from service.domain.scheduling.policy.round import Round
from service.domain.scheduling.rules.limits import HELD, held_message
from service.domain.scheduling.rules.obstacles import Reason


def plan(
    snapshot: Snapshot, now: datetime, *, on_error: OnError = lambda job_id, error: None
) -> list[Decision]:
    """Return a decision for each waiting job in the order of the queue, with held jobs at the end,
    followed by a decision for each group that could grow and a request for each job that must
    release slots.

    If a rule raises an error for a job, that job waits as `not_planned`. The other jobs are still
    planned.
    """
    order = in_order(snapshot, now, on_error)
    snapshot, gangs, running, queue = order.snapshot, order.gangs, order.running, order.queue
    accepted, of_queue, ranks = order.accepted, order.of_queue, order.ranks
    usable = accepted if snapshot.connected else ()
    ahead = {job.job_id: order.ranking.far_ahead(job) for job in snapshot.running}
    round_ = Round(usable, snapshot, order.windows, gangs, order.emptied, running, ahead, now)
    held = [job for job in snapshot.queue if job.held is not None]
    kept = [Wait(j.job_id, Reason(HELD, held_message(j.held or "", j.job_id)), None) for j in held]
    obstacle = _nothing_starts(snapshot, accepted)
    if obstacle is None and snapshot.elastic:
        waiting = [(snapshot.queue[at], of_queue[at], ranks[at]) for at in queue]
        try:
            round_.departures.choose_sizes(waiting, order.emptied, now)
        except Exception as error:
            # Continue without chosen sizes: elastic jobs then start with any size that fits.
            on_error("elastic jobs", error)

    def not_planned(job_id: str, error: Exception) -> Reason:
        on_error(job_id, error)
        return not_planned_reason(error)

    def of_group(decide: Callable[[Growing], Decision], group: Growing) -> Decision:
        try:
            return decide(group)
        except Exception as error:
            return Stay(group.job_id, not_planned(group.job_id, error))

    groups = sorted(snapshot.growing, key=lambda group: (-group.priority, group.seq))
    if obstacle is not None and not (snapshot.connected and accepted):
        lacking: list[Decision] = [Stay(g.job_id, obstacle) for g in groups if g.lacking]
    else:
        lacking = [of_group(round_.serve, group) for group in groups if group.lacking]
    if obstacle is not None:
        round_.explain(not_planned)
        waits = [
            too_early(job, position) or Wait(job.job_id, obstacle, position)
            for position, job in enumerate([snapshot.queue[at] for at in queue], 1)
        ]
        others = [Stay(g.job_id, obstacle) for g in groups if not g.lacking]
        return [*waits, *kept, *order.unsound, *lacking, *others, *round_.departures.asked]
    decisions: list[Decision] = []
    position = 1
    for at in queue:
        decision: Decision
        try:
            decision = round_.decide(snapshot.queue[at], of_queue[at], ranks[at], position)
        except Exception as error:  # slots that the job took are free again in the next plan
            name = snapshot.queue[at].job_id
            decision = Wait(name, not_planned(name, error), position)
        position += isinstance(decision, Wait)
        decisions.append(decision)
    round_.end_queue()
    grown = [of_group(round_.grow, group) for group in groups if not group.lacking]
    round_.explain(not_planned)
    return [*decisions, *kept, *order.unsound, *lacking, *grown, *round_.departures.asked]


def _nothing_starts(snapshot: Snapshot, accepted: Sequence[Node]) -> Reason | None:
    if not snapshot.connected:
        return Reason("cluster_unavailable", "waits for the connection to the Ray cluster")
    may_come = bool(snapshot.to_come)
    starting = sum(node.is_starting for node in snapshot.nodes)
    if starting and not accepted and not may_come:
        number = number_of_nodes(starting)
        return Reason("no_nodes", f"waits for a node: dray's agent is starting on {number}")
    if snapshot.nodes and not accepted and not may_come:
        return Reason("no_nodes", "waits for a node: dray refuses every node of the cluster")
    if not accepted and not may_come:
        return Reason("no_nodes", "waits for a node: the cluster has no nodes")
    if snapshot.storage_problem is not None:
        return Reason("storage_full", f"waits for free space: {snapshot.storage_problem}")
    return None
