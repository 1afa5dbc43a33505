"""Computes the ranks of jobs, taking the quotas and shares of their queues into account."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter, itemgetter

from service.domain.scheduling.placement.gangs import Gang, Gangs, WorkerKind
from service.domain.scheduling.placement.slots import Node
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy.emptied import Emptied
from service.domain.scheduling.policy.feasibility import can_ever_fit
from service.domain.scheduling.policy.records import Snapshot, Wait, WaitingJob
from service.domain.scheduling.rules import order, shares, times
from service.domain.scheduling.rules.dependencies import waits_for
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.lending import Lending
from service.domain.scheduling.rules.limits import UNLIMITED, QueueLimits
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.tree import QueueTree, Uses


class Ranking:
    """The ranks of the jobs of a snapshot."""

    def __init__(
        self,
        snapshot: Snapshot,
        gangs: Gangs,
        emptied: Emptied,
        now: datetime,
        lending: Lending | None = None,
    ) -> None:
        """`lending` contains no jobs."""
        self._lending = lending
        active = active_accounts(snapshot, gangs)
        self._standings = shares.Standings(snapshot.queues, snapshot.used_s, active)
        self._guaranteed = _within_quota(snapshot, gangs, emptied, self._standings, now)
        self._overdue = {
            job.job_id for job in snapshot.running if job.waited_s > order.LONGEST_WAIT_S
        }
        self._forgiven = {j.job_id for j in snapshot.running if j.waited_s > order.FORGIVING_S}
        self._find_overdue(snapshot, gangs, emptied, now)

    def rank(self, job: WaitingJob | RunningJob, gang: Gang) -> order.Rank:
        tiers, user = self._standing(job)
        is_forgiven = job.job_id in self._forgiven
        of_share = 0.0 if is_forgiven else self._standings.of_share(job.queue, job.owner)
        if job.job_id in self._overdue:
            work = order.OVERDUE
        else:
            work = order.work_left(job.guess_s if job.left_s is None else job.left_s, gang.weight)
        return order.Rank(
            tiers,
            -job.priority,
            user,
            of_share,
            work,
            job.seq,
            job.place,
            self._standings.path(job.queue),
            self._standings.queues_far_ahead(job.queue),
        )

    def far_ahead(self, job: RunningJob) -> shares.FarAhead:
        return self._standings.far_ahead(job.queue, job.owner)

    def is_forgiven(self, job_id: str) -> bool:
        """Whether the job ranks as if its owner had used less than their share, because it has
        waited for a long time."""
        return job_id in self._forgiven

    def _standing(self, job: WaitingJob | RunningJob) -> tuple[shares.Tiers, shares.UserStanding]:
        tiers = self._standings.tiers(job.queue, self._guaranteed.get(job.job_id, 0))
        if job.job_id in self._forgiven:
            return tiers, shares.UserStanding.BEHIND
        return tiers, self._standings.user(job.queue, job.owner)

    def _find_overdue(
        self, snapshot: Snapshot, gangs: Gangs, emptied: Emptied, now: datetime
    ) -> None:
        """Find the waiting jobs that come first because they have waited longest: one for each
        combination of tier, priority and the user's standing."""
        waiting = [job for job in snapshot.queue if job.waited_s > order.LONGEST_WAIT_S]
        waiting.sort(key=lambda job: (-job.waited_s, job.seq))
        able = Able(snapshot, gangs, now)
        found, forgave = set(), set()
        for job in waiting:
            tiers, user = self._standing(job)
            among = tiers, job.priority
            is_behind = user is shares.UserStanding.BEHIND
            forgives = job.waited_s > order.FORGIVING_S and not is_behind and among not in forgave
            if (among, user) in found and not forgives:
                continue
            gang = gangs.of(job.request)
            # A job that waits for new nodes, or for slots of other programs, would delay every job.
            # A job that is bound to a reservation does not compete with most of the others.
            if gang.request.is_bound or not emptied.can_hold(gang):
                continue
            if not may_borrow(self._lending, job, gang, self.rank(job, gang)):
                continue
            if not able.claims_capacity(job, gang):
                continue
            if forgives:
                forgave.add(among)
                if self._forgiven_share(snapshot, gangs, job) < order.FORGIVEN_SHARE:
                    self._forgiven.add(job.job_id)
                    user = shares.UserStanding.BEHIND
            if (among, user) not in found:
                found.add((among, user))
                self._overdue.add(job.job_id)

    def _forgiven_share(self, snapshot: Snapshot, gangs: Gangs, waiting: WaitingJob) -> float:
        """Return the share of the cluster held by forgiven jobs that were submitted earlier."""
        return sum(
            gangs.of(job.request).share
            for job in snapshot.running
            if job.job_id in self._forgiven and job.seq < waiting.seq
        )


def active_accounts(snapshot: Snapshot, gangs: Gangs | None = None) -> set[shares.Account]:
    """Return the accounts with running jobs or with jobs that could run. An account whose jobs are
    all blocked, or don't fit on the accepted nodes, is not considered active, because it could not
    use its share."""
    active = {(job.queue, job.owner) for job in snapshot.running}
    gangs, used_up = gangs or Gangs({}), snapshot.used_up
    nodes = [node for node in snapshot.nodes if node.accepted]
    topology = Topology(snapshot.topology, nodes) if snapshot.topology else None
    fits: dict[Gang, bool] = {}
    for job in snapshot.queue:
        account = job.queue, job.owner
        if account in active or is_kept_back(job, used_up):
            continue
        gang = gangs.of(job.request).anywhere
        if gang not in fits:
            fits[gang] = can_ever_fit(gang.request, nodes, topology) is None
        if fits[gang]:
            active.add(account)
    return active


def at_the_front(
    snapshot: Snapshot, ranks: Sequence[order.Rank], running: Mapping[str, order.Rank]
) -> tuple[list[order.Rank], dict[str, order.Rank]]:
    """Return the ranks of waiting and running jobs, adjusted for jobs that were moved to the front.
    A running job keeps its `place`, so that jobs that it has overtaken can't evict it."""
    waiting = zip(snapshot.queue, ranks, strict=True)
    could = [(job.queue, r) for job, r in waiting if not is_kept_back(job, snapshot.used_up)]
    fronts = order.Fronts(could)
    in_queue = zip(snapshot.queue, ranks, strict=True)
    there = {job.job_id: fronts.rank(job.queue, running[job.job_id]) for job in snapshot.running}
    return [fronts.rank(job.queue, rank) for job, rank in in_queue], there


_Claim = tuple[WaitingJob | RunningJob, Gang]


def _within_quota(
    snapshot: Snapshot,
    gangs: Gangs,
    emptied: Emptied,
    standings: shares.Standings,
    now: datetime,
) -> dict[str, int]:
    """Return the jobs whose slots are guaranteed by the quota of a queue on their path, and the
    number of such queues: if a queue guarantees the slots, so do all queues above it.

    Jobs claim the quota of their own queue, in the order of priority; among jobs with the same
    priority, running jobs come first. The other jobs then claim the rest of the quota of the
    parent, without the resources that its children keep because of their lending limits, and so on.
    Waiting jobs that can't start now are not counted."""
    tree = QueueTree(snapshot.queues)
    if not tree.quotas:
        return {}
    claims = _claims(snapshot, gangs, emptied, tree, now)
    if tree.depth == 1:
        return dict.fromkeys(_granted(claims, tree.quotas, 0, standings, gangs), 1)
    all_claims = list(claims)
    by_rank = sorted(all_claims, key=lambda each: _rank_in_queue(each[0], each[1], standings))
    paths = {job.queue: standings.path(job.queue) for job, _ in all_claims}
    claimed: defaultdict[str | None, dict[str, float]] = defaultdict(dict)
    found: dict[str, int] = {}
    for level in reversed(range(tree.depth)):
        here = [name for name in tree.quotas if len(tree.path(name)) == level + 1]
        left = {name: _unclaimed(tree, name, claimed) for name in here}
        under = {
            queue: standings.tiers(queue)[level + 1 :]
            for queue, path in paths.items()
            if path[level + 1 :] and path[level] in left
        }
        own = [each for each in all_claims if each[0].queue in left]
        others = [
            each for each in by_rank if each[0].queue in under and each[0].job_id not in found
        ]
        # Running jobs come first, so that the queue does not take back more than its quota.
        others.sort(key=lambda each: (isinstance(each[0], WaitingJob), under[each[0].queue]))
        granted = set(_granted([*own, *others], left, level, standings, gangs))
        for job, gang in all_claims:
            if job.job_id in granted:
                _count_claim(claimed, paths[job.queue][: level + 1], gang)
        found |= dict.fromkeys(granted, level + 1)
    return found


def _granted(
    claims: Iterable[_Claim],
    quotas: Mapping[str, Mapping[str, float]],
    level: int,
    standings: shares.Standings,
    gangs: Gangs,
) -> Iterator[str]:
    """Yield the jobs whose claims are granted by the queues at this level of their paths."""
    left = shares.Quotas(quotas, gangs.kinds)
    if left.are_spent:
        return
    for job, gang in claims:
        if left.grant(standings.path(job.queue)[level], gang.kind, gang.least):
            yield job.job_id
        if left.are_spent:
            return


def _rank_in_queue(
    job: WaitingJob | RunningJob, gang: Gang, standings: shares.Standings
) -> tuple[object, ...]:
    """Return the key by which the jobs of a queue are sorted when they claim the quota of a queue
    above their own. Waiting jobs come in the order in which they rank within the queue, so that the
    quota doesn't change this order."""
    left_s = job.guess_s if job.left_s is None else job.left_s
    return (
        *(-job.priority, job.place, standings.user(job.queue, job.owner)),
        *(order.work_left(left_s, gang.weight), job.seq),
    )


def _unclaimed(tree: QueueTree, name: str, claimed: Uses) -> dict[str, float]:
    """Return the part of a queue's quota that its jobs can still claim."""
    of_queue = claimed.get(name, {})
    return {
        resource: amount
        - of_queue.get(resource, 0.0)
        - sum(tree.reserved(name, resource, claimed).values())
        for resource, amount in tree.quotas[name].items()
    }


def _count_claim(
    claimed: defaultdict[str | None, dict[str, float]], path: Sequence[str], gang: Gang
) -> None:
    for name in path:
        for resource, each in gang.kind.counted:
            of_queue = claimed[name]
            of_queue[resource] = of_queue.get(resource, 0.0) + gang.least * each


def _claims(
    snapshot: Snapshot, gangs: Gangs, emptied: Emptied, tree: QueueTree, now: datetime
) -> Iterator[_Claim]:
    """Return the jobs that count against a quota, in the order in which they claim it."""
    having = {name for name in tree.queues if not tree.quotas.keys().isdisjoint(tree.path(name))}
    in_order: defaultdict[tuple[int, bool], list[WaitingJob | RunningJob]] = defaultdict(list)
    for running in snapshot.running:
        if running.queue in having:
            gangs.of(running.request)
            in_order[-running.priority, False].append(running)
    for waiting in snapshot.queue:
        if waiting.queue in having or waiting.array is not None:
            in_order[-waiting.priority, True].append(waiting)
    able = Able(snapshot, gangs, now)
    for_each = (
        (job, gangs.of(job.request))
        for _, jobs in sorted(in_order.items(), key=itemgetter(0))
        for job in sorted(jobs, key=attrgetter("place", "seq"))
    )
    return (
        (job, gang)
        for job, gang in for_each
        if isinstance(job, RunningJob)
        or (emptied.lets_claim(gang) and able.claims_capacity(job, gang))
    )


class Able:
    """Determines which waiting jobs, checked one after another, could start now if enough slots
    were free, and how many workers jobs could add."""

    def __init__(
        self, snapshot: Snapshot, gangs: Gangs, now: datetime, lending: Lending | None = None
    ) -> None:
        """`lending` is a trial copy, and is modified. Without `lending`, lending limits are
        ignored."""
        self._now = now
        self._lending = lending
        self._used_up = snapshot.used_up
        self._in_arrays = Counter(snapshot.running_of_arrays)
        self._limits = limits_of(snapshot, gangs)

    def claims_capacity(self, job: WaitingJob, gang: Gang) -> bool:
        """Return whether the job could start if enough slots were free, and if so, count it against
        its limits. Returns False if the limits don't allow enough workers, or if the job waits for
        something other than slots."""
        backs_off = job.not_before is not None and job.not_before > self._now
        if backs_off or job.preparing or is_kept_back(job, self._used_up):
            return False
        if job.array is not None:
            self._in_arrays[job.array.array_id] += 1
            if self._in_arrays[job.array.array_id] > job.array.max_running:
                return False
        limits = self._limits.of((job.queue, job.owner))
        if limits is not None and not limits.allows(job.job_id, gang.kind, gang.least):
            return False
        self.count(job, gang.kind, gang.least)
        return True

    def most_more(self, job: WaitingJob | RunningJob, kind: WorkerKind) -> int:
        """Return how many workers the job could add under the limits, and without slots that other
        queues keep for themselves."""
        limits = self._limits.of((job.queue, job.owner))
        most = (limits.headroom(job.job_id, kind, 1) if limits else UNLIMITED).workers
        lent = None if self._lending is None else self._lending.workers(job.queue, kind, soon=True)
        return most if lent is None else min(most, lent[0])

    def count(self, job: WaitingJob | RunningJob, kind: WorkerKind, num_workers: int) -> None:
        """Count workers that the job would add."""
        limits = self._limits.of((job.queue, job.owner))
        if limits is not None:
            limits.take(job.job_id, kind, num_workers)
        if self._lending is not None:
            self._lending.expect(job.queue, kind, num_workers)


def limits_of(
    snapshot: Snapshot, gangs: Gangs, lendable: Sequence[Node] | None = None
) -> QueueLimits:
    """Return the limits of queues. The slots that jobs hold, and the slots that running groups
    lack, count towards the limits. `lendable` is described in `QueueLimits`."""
    limits = QueueLimits(snapshot.queues, snapshot.holders, snapshot.used_up, lendable)
    for group in snapshot.growing:
        of_account = limits.of((group.queue, group.owner))
        if of_account is not None:
            of_account.reserve(group.job_id, gangs.of(group.request).kind, group.lacking)
    return limits


def may_borrow(lending: Lending | None, job: WaitingJob, gang: Gang, rank: order.Rank) -> bool:
    """Whether the lending limits of other queues can ever allow a job. A job within the quota of
    its own queue borrows nothing."""
    is_own = rank.tiers[-1] is shares.Tier.QUOTA
    return lending is None or is_own or lending.ever_allows(job.queue, gang.kind, gang.least)


def is_kept_back(job: WaitingJob, used_up: Collection[str]) -> bool:
    """Whether the job is held, waits for other jobs, its begin time or its reservation, or is in a
    queue whose budget is used up."""
    is_early = job.held or job.after or job.begins_at or job.not_yet
    return bool(is_early) or job.queue in used_up


def too_early(job: WaitingJob, position: int) -> Wait | None:
    """Return a decision if the job waits for other jobs to end, its begin time or its
    reservation."""
    if job.after:
        reason = Reason("waiting_for_jobs", waits_for(job.after))
        return Wait(job.job_id, reason, position, tuple(one.id for one in job.after))
    if job.begins_at is not None:
        return Wait(job.job_id, Reason(times.BEGINS_AT, times.begins(job.begins_at)), position)
    return None if job.not_yet is None else Wait(job.job_id, job.not_yet, position)
