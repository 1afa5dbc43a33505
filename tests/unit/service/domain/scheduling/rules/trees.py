"""Random trees of queues with jobs that need one GPU each, and a slow oracle: recursions over the
tree that state what the guide promises, without code of the scheduler."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from service.domain.scheduling.policy import RunningJob, Snapshot, WaitingJob
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.domain.scheduling.snapshots import HOUR

Job = WaitingJob | RunningJob
USERS = ("ann", "bob")


def tree_of(draw: random.Random) -> list[Queue]:
    """Return up to 8 queues on up to 3 levels. The quotas of children may exceed their parent's."""
    queues = [Queue("q0", weight=draw.choice([1.0, 2.0]))]
    for number in range(1, draw.randint(2, 8)):
        parents = [queue.name for queue in queues if depth(queues, queue.name) < 3]
        queues.append(
            Queue(
                f"q{number}",
                weight=draw.choice([1.0, 2.0, 0.5]),
                parent=draw.choice([None, *parents, *parents]),
            )
        )
    return [with_rules(draw, queue) for queue in queues]


def with_rules(draw: random.Random, queue: Queue) -> Queue:
    some: dict[str, dict[str, float]] = {}
    if draw.random() < 0.5:
        some["quota"] = {"GPU": float(draw.randint(0, 4))}
        for rule, chance in (("borrowing_limit", 0.25), ("lending_limit", 0.4)):
            if draw.random() < chance:
                some[rule] = {"GPU": float(draw.randint(0, 3))}
    if draw.random() < 0.25:
        some["limit"] = {"GPU": float(draw.randint(1, 6))}
    most = draw.choice([None, None, None, None, 1, 3])
    return replace(queue, max_running=most, **some)


def depth(queues: Sequence[Queue], name: str) -> int:
    parent = named(queues, name).parent
    return 1 if parent is None else 1 + depth(queues, parent)


def named(queues: Sequence[Queue], name: str) -> Queue:
    return next(queue for queue in queues if queue.name == name)


def snapshot_of(draw: random.Random, queues: Sequence[Queue], num_waiting: int) -> Snapshot:
    """Return a node of 4 to 10 GPUs, of which some are in use, and waiting jobs of leaves."""
    parents = {queue.parent for queue in queues}
    leaves = [queue.name for queue in queues if queue.name not in parents]
    gpus = draw.randint(4, 10)
    there = [
        snapshots.running(
            f"r{number}",
            {"n": 1},
            queue=draw.choice(leaves),
            owner=draw.choice(USERS),
            priority=draw.choice([10, 50, 50]),
            seq=number,
            held_s=draw.choice([0.0, MIN_RUN_S, HOUR]),
            left_s=draw.choice([HOUR, 30 * HOUR]),
            yields=draw.random() < 0.6,
        )
        for number in range(draw.choice([gpus, gpus, gpus - 1, draw.randint(0, gpus)]))
    ]
    waiting = [
        snapshots.waiting(
            f"w{number}",
            queue=draw.choice(leaves),
            owner=draw.choice(USERS),
            priority=draw.choice([10, 50, 50, 90]),
            seq=100 + number,
            left_s=draw.choice([HOUR, 30 * HOUR]),
            yields=False,
        )
        for number in range(num_waiting)
    ]
    draw.shuffle(waiting)
    used_s = {
        (leaf, user): draw.random() * draw.choice([0.0, 2 * HOUR, 20 * HOUR])
        for leaf in leaves
        for user in USERS
    }
    return snapshots.snapshot(
        waiting, there, {"n": float(gpus)}, queues=tuple(queues), used_s=used_s
    )


@dataclass
class TreeOracle:
    """What the rules mean for a snapshot whose jobs need one GPU each."""

    snapshot: Snapshot

    def queue(self, name: str) -> Queue:
        return named(self.snapshot.queues, name)

    def children(self, name: str | None) -> list[str]:
        return [queue.name for queue in self.snapshot.queues if queue.parent == name]

    def line(self, name: str) -> list[str]:
        """The queue and the queues above it."""
        parent = self.queue(name).parent
        return [name, *([] if parent is None else self.line(parent))]

    def quota(self, name: str) -> float:
        own = self.queue(name).quota.get("GPU")
        return sum(self.quota(child) for child in self.children(name)) if own is None else own

    def jobs(self, name: str | None, jobs: Sequence[Job]) -> list[Job]:
        """The jobs in and under a queue."""
        return [job for job in jobs if name is None or name in self.line(job.queue)]

    # May a job start?

    def limits(self, name: str) -> Iterator[float]:
        queue = self.queue(name)
        yield queue.limit.get("GPU", 1e9)
        if "GPU" in queue.borrowing_limit:
            yield queue.quota["GPU"] + queue.borrowing_limit["GPU"]
        if queue.max_running is not None:
            yield queue.max_running

    def binding(self, job: Job, holding: Sequence[Job]) -> str | None:
        """The lowest queue whose limits don't allow one more job."""
        for name in self.line(job.queue):
            if len(self.jobs(name, holding)) + 1 > min(self.limits(name)):
                return name
        return None

    def kept(self, name: str, holding: Sequence[Job]) -> float:
        """The idle GPUs that a queue does not lend."""
        below = sum(self.kept(child, holding) for child in self.children(name))
        lends = self.queue(name).lending_limit.get("GPU")
        if lends is None:
            return below
        return max(below, self.quota(name) - lends - len(self.jobs(name, holding)))

    def lendable(self, job: Job, holding: Sequence[Job]) -> float:
        """The GPUs of the cluster that are neither in use nor kept for others."""
        line = self.line(job.queue)
        siblings = [s for above in (None, *line) for s in self.children(above) if s not in line]
        total = self.snapshot.nodes[0].total["GPU"]
        return total - len(holding) - sum(self.kept(name, holding) for name in siblings)

    def is_within_quota(self, job: Job) -> bool:
        """Whether the job is within the quota of its own queue, so that it borrows nothing."""
        return (job.queue, job.job_id) in self.guaranteed

    # Whose turn is it?

    def used(self, name: str) -> float:
        own = sum(s for (queue, _), s in self.snapshot.used_s.items() if queue == name)
        return own + sum(self.used(child) for child in self.children(name))

    def is_active(self, name: str) -> bool:
        return bool(self.jobs(name, [*self.snapshot.running, *self.snapshot.queue]))

    def siblings(self, name: str) -> list[str]:
        return [each for each in self.children(self.queue(name).parent) if self.is_active(each)]

    def part(self, name: str | None) -> float:
        """The fraction of the cluster to which the weights entitle a queue."""
        if name is None:
            return 1.0
        weights = sum(self.queue(each).weight for each in self.siblings(name))
        return self.part(self.queue(name).parent) * self.queue(name).weight / weights

    def excess(self, name: str) -> float:
        """The usage beyond the share, in margins."""
        parent = self.queue(name).parent
        whole = sum(self.used(each) for each in self.siblings(name))
        due = whole * self.part(name) / self.part(parent)
        return (self.used(name) - due) / (HOUR * self.part(parent))

    def standing(self, job: Job) -> int:
        """-1 if the user has used less than their share of the queue, 1 if more."""
        active = [*self.snapshot.running, *self.snapshot.queue]
        users = {each.owner for each in active if each.queue == job.queue}
        used = {user: self.snapshot.used_s.get((job.queue, user), 0.0) for user in users}
        margin = min(4 * HOUR, 10 * HOUR / len(users)) * self.part(job.queue)
        beyond = used[job.owner] - sum(used.values()) / len(users)
        return (beyond > margin) - (beyond < -margin)

    def usage(self, job: Job) -> float:
        """The part of their share that a user who is behind or ahead has used."""
        if not self.standing(job):
            return 0.0
        active = [*self.snapshot.running, *self.snapshot.queue]
        users = {each.owner for each in active if each.queue == job.queue}
        used = {user: self.snapshot.used_s.get((job.queue, user), 0.0) for user in users}
        return used[job.owner] * len(users) / sum(used.values())

    @functools.cached_property
    def guaranteed(self) -> set[tuple[str, str]]:
        """Pairs of a queue and a job within its quota."""
        found: set[tuple[str, str]] = set()
        for top in self.children(None):
            self.grant(top, found)
        return found

    def grant(self, name: str, found: set[tuple[str, str]]) -> list[Job]:
        """Grant the quotas in and under a queue; return the jobs that are within them."""
        within = [job for child in self.children(name) for job in self.grant(child, found)]
        others = [job for job in self.able if job not in within and name in self.line(job.queue)]
        if self.children(name):
            others.sort(key=functools.cmp_to_key(lambda a, b: self.claims_before(name, a, b)))
        kept = sum(self.unlent(child, within) for child in self.children(name))
        for job in others:
            if "GPU" in self.named_quotas(name) and len(within) + 1 + kept <= self.quota(name):
                within.append(job)
        found |= {(name, job.job_id) for job in within}
        return within

    def named_quotas(self, name: str) -> set[str]:
        below = [resource for child in self.children(name) for resource in self.named_quotas(child)]
        return {*self.queue(name).quota, *below}

    def unlent(self, name: str, within: Sequence[Job]) -> float:
        return self.kept(name, within)

    @functools.cached_property
    def able(self) -> list[Job]:
        """The jobs that hold slots or could, in the order in which they claim their own quota."""
        jobs: list[Job] = [*self.snapshot.running, *self.snapshot.queue]
        jobs.sort(key=lambda job: (-job.priority, isinstance(job, WaitingJob), job.seq))
        holding: list[Job] = list(self.snapshot.running)
        found = []
        for job in jobs:
            if isinstance(job, WaitingJob):
                if self.binding(job, holding) is not None:
                    continue
                holding.append(job)
            found.append(job)
        return found

    def claims_before(self, name: str, a: Job, b: Job) -> int:
        """Compare two jobs that claim the quota of a queue above their own."""
        if isinstance(a, RunningJob) != isinstance(b, RunningJob):
            return -1 if isinstance(a, RunningJob) else 1
        for ours, theirs in zip(self.below(name, a), self.below(name, b), strict=False):
            if (self.excess(ours) > 1) != (self.excess(theirs) > 1):
                return 1 if self.excess(ours) > 1 else -1
        return self.ties(name, a, b)

    def below(self, name: str, job: Job) -> list[str]:
        line = self.line(job.queue)
        return list(reversed(line[: line.index(name)]))

    def ties(self, name: str, a: Job, b: Job) -> int:
        longer = {len(self.below(name, each)): each for each in (a, b)}
        if len(longer) > 1:  # a queue without children counts as its only child, within its share
            for queue in self.below(name, longer[max(longer)])[min(longer) :]:
                if self.excess(queue) > 1:
                    return 1 if longer[max(longer)] is a else -1
        ours, theirs = self.rest(a), self.rest(b)
        return (ours > theirs) - (ours < theirs)

    def rest(self, job: Job) -> tuple[float, ...]:
        """The rank of a job apart from its queues."""
        total = self.snapshot.nodes[0].total["GPU"]
        assert job.left_s is not None
        work = (job.left_s + 300) * (1 / total) ** 0.7
        return -job.priority, self.standing(job), self.usage(job), work, job.seq

    def tier(self, job: Job, at: int) -> int:
        """0 within the quota, 2 if the queue is ahead, 1 otherwise; `at` counts from the top."""
        path = list(reversed(self.line(job.queue)))
        if at >= len(path):
            return 0 if (path[-1], job.job_id) in self.guaranteed else 1
        if (path[at], job.job_id) in self.guaranteed:
            return 0
        return 2 if self.excess(path[at]) > 1 else 1

    def is_before(self, a: Job, b: Job, at: int = 0) -> bool:
        """Whether it is the turn of the first job."""
        if at == 3:
            return self.rest(a) < self.rest(b)
        ours, theirs = self.tier(a, at), self.tier(b, at)
        return ours < theirs if ours != theirs else self.is_before(a, b, at + 1)

    # What may be reclaimed?

    def parting(self, a: Job, b: Job) -> int:
        """The level at which the queues of two jobs differ; the last level for the same queue."""
        ours, theirs = (list(reversed(self.line(each.queue))) for each in (a, b))
        for at in range(3):
            if ours[at : at + 1] != theirs[at : at + 1]:
                return at
        return 2

    def may_take(self, coming: Job, running: RunningJob) -> bool:
        """Whether a waiting job may take the slot of a running job."""
        at = self.parting(coming, running)
        comes_first = self.is_before(coming, running, 0) and self.is_before(coming, running, at)
        if running.held_s < MIN_RUN_S or not comes_first:
            return False
        ours, theirs = self.tier(coming, at), self.tier(running, at)
        if ours == 0 and theirs != 0:
            return True
        path = list(reversed(self.line(running.queue)))
        is_far = at < len(path) and self.excess(path[at]) > 2
        if ours == 2 and self.excess(self.line(coming.queue)[-1 - at]) > 2 and not is_far:
            return False
        if ours == theirs and coming.priority > running.priority:
            return True
        far = is_far and ours < theirs
        user = self.standing(coming) < self.standing(running) and self.is_far(running)
        user = user and coming.queue == running.queue
        less = coming.priority == running.priority
        less = less and self.rest(coming)[3] < 0.5 * self.rest(running)[3]
        return running.yields and (far or user or less)

    def is_far(self, job: Job) -> bool:
        active = [*self.snapshot.running, *self.snapshot.queue]
        users = {each.owner for each in active if each.queue == job.queue}
        used = {user: self.snapshot.used_s.get((job.queue, user), 0.0) for user in users}
        margin = min(4 * HOUR, 10 * HOUR / len(users)) * self.part(job.queue)
        return used[job.owner] - sum(used.values()) / len(users) > 2 * margin
