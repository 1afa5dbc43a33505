"""Finds changes that would let a waiting job start: fewer workers, less of a resource, another
queue, a higher priority, no required topology, or a limit on the running time.

A change is tried out before it is suggested: the policy is called with the changed job and all
other jobs unchanged. If the job would not start immediately, a simulation predicts its start.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from service.domain.scheduling import policy
from service.domain.scheduling.outlook import ranges
from service.domain.scheduling.outlook.simulation import Expected, Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.heterogeneous import place_heterogeneous
from service.domain.scheduling.placement.phrases import amount_of, workers
from service.domain.scheduling.placement.slots import Request, count, fits
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.rules.limits import (
    LENDING_LIMIT,
    QUEUE_LIMIT,
    USER_LIMIT,
    why_never,
)
from service.domain.scheduling.rules.obstacles import Reason, jobs
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.reservations import RESERVED

UNSATISFIABLE = "unsatisfiable"
LIMITS = (QUEUE_LIMIT, USER_LIMIT, LENDING_LIMIT)
MAX_QUEUES = 3
"""Maximum number of other queues to try."""
MAX_SIZES = 2
"""Maximum number of smaller amounts to try for each kind of change."""
MAX_CHECKED = 16
"""Maximum number of smaller sizes to check when searching for the largest size with a valid
document."""
RUN_TIMES_S = (7 * 86400, 86400, 4 * 3600, 3600, 600)
"""The limits of the running time that are tried for a job that would not leave reserved nodes in
time."""
GIB = 2.0**30
UNITS = {"CPU": 1.0, "GPU": 1.0, "memory": GIB}
"""The amounts that are tried for a worker's resources are multiples of these units."""
MAX_PLANS = 60
"""Maximum number of calls to the policy for one expected start."""
SOONER_S = 5.0
"""Minimum number of seconds by which a suggested start must precede the expected start."""


class Resubmit(Protocol):
    """Returns the waiting job that would result from submitting the job's document with one
    change."""

    def __call__(self, job: WaitingJob, change: Change) -> WaitingJob | None:
        """Return None if the document would be refused."""


@dataclass(frozen=True)
class Change:
    """A change to a job's document."""

    num_workers: int | None = None
    min_workers: int | None = None
    """The minimum size of an elastic job."""
    num_spares: int | None = None
    of_worker: tuple[str, float] | None = None
    """The name of a resource, and its new amount per worker."""
    anywhere: bool = False
    """Whether to remove `required_topology`."""
    max_runtime_s: int | None = None

    @property
    def words(self) -> str:
        if self.of_worker is not None:
            return f"with {amount_of(*self.of_worker)} for each worker"
        if self.min_workers is not None:
            return f"with elastic.min_workers {self.min_workers}"
        if self.num_spares is not None:
            return f"with elastic.spares {self.num_spares}"
        if self.num_workers is not None:
            return f"with {workers(self.num_workers)}"
        if self.max_runtime_s is not None:
            return f"with max_runtime_s {self.max_runtime_s}"
        return "without required_topology"


@dataclass(frozen=True)
class Counterfactual:
    """A possible change to a job, and when the changed job would start."""

    message: str
    at: datetime | None
    """When the job would start; None if it would never start, or if the time is unknown."""
    change: Change | None = None
    """The change to the document, if any."""
    queue: str | None = None
    priority: int | None = None

    @property
    def num_workers(self) -> int | None:
        return None if self.change is None else self.change.num_workers


def refuses_all(job: WaitingJob, change: Change) -> WaitingJob | None:
    """Refuse every change. Used as the `Resubmit` of jobs whose documents can't be submitted
    again."""
    return None


Resources = Mapping[str, Mapping[str, float]]
"""Resources by node id."""
Sizes = tuple[int, Callable[[int], Change]]
"""The largest size to try, and a function that returns the change for a size."""


@dataclass(frozen=True)
class OtherQueue:
    """A queue to which the job could be moved."""

    queue: Queue
    ends_within_s: float | None
    """`WaitingJob.ends_within_s` in this queue, which can have another default limit."""


@dataclass(frozen=True)
class Choices:
    """The changes that the job's user is allowed to make."""

    resubmit: Resubmit = refuses_all
    queues: tuple[OtherQueue, ...] = ()
    """Other queues that would accept the job."""
    max_priority: int = 100


def sooner(found: Iterable[Counterfactual], expected_at: datetime | None) -> list[Counterfactual]:
    """Return the counterfactuals that make the job start earlier than expected."""
    if expected_at is None:
        return list(found)
    latest = expected_at - timedelta(seconds=SOONER_S)
    return [each for each in found if each.at is None or each.at <= latest]


class JobQuestions:
    """Answers questions about one job. If the situation contains an older version of the job, that
    version is ignored."""

    def __init__(self, situation: Situation, job: WaitingJob, now: datetime) -> None:
        self.job = job
        self._now = now
        self._situation = situation.without(job.job_id)
        self._nodes, self._topology = situation.nodes, situation.topology
        heads = tuple(self._situation.heads)
        self._snapshot = replace(situation.snapshot, queue=heads)

    @functools.cached_property
    def decision(self) -> policy.Decision:
        """The decision about the unchanged job."""
        return self._decide(self.job)

    def expected(self) -> Expected:
        """Return when the unchanged job is expected to start, according to a simulation."""
        if isinstance(self.decision, policy.Impossible):
            return Expected(None, self.decision.reason)
        there = self._with(self.job)
        plays = ranges.plays(there, self._now, only=self.job.job_id, max_plans=MAX_PLANS)
        in_order = sorted(plays, key=lambda play: play is not plays[ranges.MIDDLE])
        if any(play.run() and play.has_run_out for play in in_order):
            return self._bound(plays[ranges.MIDDLE])
        return ranges.expected(there, plays)[self.job.job_id]

    def _bound(self, played: Simulation) -> Expected:
        """Return a lower bound on the start time. Called if jobs that the situation leaves out may
        be ahead of this job."""
        found = played.starts[self.job.job_id]
        if found.at is None and found.not_before is None:
            return found
        number = sum(self._situation.left_out.values())
        message = f"{number} more jobs are waiting, and some of them are ahead of this job"
        bound = found.not_before if found.at is None else found.at
        return Expected(None, Reason("beyond_forecast", message), not_before=bound)

    def _with(self, job: WaitingJob) -> Situation:
        """Return the situation with this job inserted at its position in the queue."""
        queue = self._situation.snapshot.queue
        order = [decision.job_id for decision in self._plan(job)]
        behind = set(order[order.index(job.job_id) + 1 :])
        at = next((n for n, other in enumerate(queue) if other.job_id in behind), len(queue))
        with_it = (*queue[:at], job, *queue[at:])
        return replace(self._situation, snapshot=replace(self._situation.snapshot, queue=with_it))

    def answers(self, choices: Choices, why: Reason) -> list[Counterfactual]:
        """Return the changes that would let the job start. why: the reason why the job is
        waiting."""
        if why.code == UNSATISFIABLE:
            not_now = Counterfactual(f"never on the current cluster: {why.message}", None)
            return [not_now, *self._that_could_ever_start(choices)]
        found = [*self._anywhere(choices), *self._with_less(choices)]
        if why.code == RESERVED:
            found += self._with_limit(choices)
        # Another queue helps only if it has different limits or different rules about which jobs
        # come first, or if its jobs can use reserved nodes.
        if why.code in (*LIMITS, RESERVED) or self._situation.favoured(
            self.job.queue, self.job.owner
        ):
            found += self._in_other_queues(choices.queues)
        return [*found, *self._at_higher_priority(choices.max_priority)]

    def _that_could_ever_start(self, choices: Choices) -> Iterator[Counterfactual]:
        for most, to_size in self._less({node.id: node.total for node in self._nodes}):
            found = self._largest(choices, most, to_size)
            if found is not None and self._starts_alone(found[2]):
                change = found[1]
                message = f"could start eventually {change.words}"
                yield Counterfactual(message, None, change)

    def _starts_alone(self, job: WaitingJob) -> bool:
        """Whether the job would start if there were no other jobs."""
        nodes = tuple(replace(node, available_to_us=node.total) for node in self._nodes)
        empty = replace(
            self._snapshot, queue=(job,), nodes=nodes, holders=(), running=(), growing=()
        )
        return any(isinstance(each, policy.Start) for each in policy.plan(empty, self._now))

    def _anywhere(self, choices: Choices) -> Iterator[Counterfactual]:
        if self.job.request.required_level is not None:
            change = Change(anywhere=True)
            anywhere = choices.resubmit(self.job, change)
            if anywhere is not None:
                for found in self._tried(anywhere, change.words):
                    yield replace(found, change=change)

    def _with_less(self, choices: Choices) -> Iterator[Counterfactual]:
        for size, to_size in self._less({node.id: node.available_to_us for node in self._nodes}):
            for _ in range(MAX_SIZES):
                found = self._largest(choices, size, to_size)
                if found is None:
                    break
                size, change, smaller = found
                if isinstance(self._decide(smaller), policy.Start):
                    message = f"starts now {change.words}"
                    yield Counterfactual(message, self._now, change)
                    break
                size //= 2

    def _with_limit(self, choices: Choices) -> Iterator[Counterfactual]:
        own_s = math.inf if self.job.ends_within_s is None else self.job.ends_within_s
        for limit_s in RUN_TIMES_S:
            change = Change(max_runtime_s=limit_s)
            limited = choices.resubmit(self.job, change) if limit_s < own_s else None
            if limited is not None and isinstance(self._decide(limited), policy.Start):
                yield Counterfactual(f"starts now {change.words}", self._now, change)
                return

    def _largest(
        self, choices: Choices, most: int, to_size: Callable[[int], Change]
    ) -> tuple[int, Change, WaitingJob] | None:
        """Return (size, change, changed job) for the largest size up to `most` with a valid
        document."""
        for size in range(most, max(0, most - MAX_CHECKED), -1):
            change = to_size(size)
            job = choices.resubmit(self.job, change)
            if job is not None:
                return size, change, job
        return None

    def _less(self, there: Resources) -> Iterator[Sizes]:
        """For each amount that can be reduced, yield the largest value with which the job might fit
        on these nodes, and a function that returns the change."""
        request = self.job.request
        if not request.roles:  # it is unknown which roles a smaller number of workers would have
            most = min(self._capacity_of(request, there), request.least - 1)
            if request.num_spares and request.min_workers is None:
                num_ranks = request.num_ranks
                yield most, lambda number: Change(num_spares=number - num_ranks)
            elif request.min_workers is None:
                yield most, lambda number: Change(num_workers=number)
            else:
                yield most, lambda number: Change(min_workers=number)
        for name, unit in UNITS.items():
            asked = request.bundle.get(name, 0.0)
            most = self._most_units(name, unit, math.ceil(asked / unit) - 1, there)
            yield most, functools.partial(_of_worker, name, unit)

    def _most_units(self, name: str, unit: float, below: int, there: Resources) -> int:
        """Return the largest number of units of a resource, up to `below`, with which the job fits;
        0 if there is no such number."""
        request = self.job.request

        def has_capacity(units: int) -> bool:
            less = replace(request, bundle={**request.bundle, name: units * unit})
            return self._capacity_of(less, there) >= request.least

        return bisect.bisect_left(
            range(1, below + 1), True, key=lambda units: not has_capacity(units)
        )

    def _capacity_of(self, request: Request, there: Resources) -> int:
        """Return how many workers fit into one domain of the required level, or on all nodes if no
        level is required."""
        if request.roles:
            return count(place_heterogeneous(request, there, self._topology))
        sizes = {node_id: fits(request.bundle, has) for node_id, has in there.items()}
        return self._topology.together(sizes, request.required_level)

    def _in_other_queues(self, queues: Sequence[OtherQueue]) -> Iterator[Counterfactual]:
        others = [other for other in queues if other.queue.name != self.job.queue]
        usable = [other for other in others if why_never(other.queue, self.job.request) is None]
        for other in usable[:MAX_QUEUES]:
            queue = other.queue
            priority = min(self.job.priority, queue.max_priority)
            words = f"in queue {queue.name!r}"
            if priority < self.job.priority:
                words += f" at priority {priority}"
            moved = replace(
                self.job,
                queue=queue.name,
                priority=priority,
                place=0,
                ends_within_s=other.ends_within_s,
            )
            for found in self._tried(moved, words):
                lower = priority if priority < self.job.priority else None
                yield replace(found, queue=queue.name, priority=lower)

    def _at_higher_priority(self, most: int) -> Iterator[Counterfactual]:
        """Try the lowest priority that exceeds the priorities of all other waiting jobs, but no
        higher priority than `most`, the highest priority that the user is allowed to set."""
        others = (job.priority for job in self._snapshot.queue)
        priority = min(most, max(others, default=self.job.priority) + 1)
        if priority > self.job.priority:
            raised = replace(self.job, priority=priority, place=0)
            for found in self._tried(raised, f"at priority {priority}", later=True):
                yield replace(found, priority=priority)

    def _tried(
        self, job: WaitingJob, words: str, *, later: bool = False
    ) -> Iterator[Counterfactual]:
        """Yield a counterfactual if the changed job starts immediately or as soon as other jobs
        have released slots for it. later: whether to also yield one if the job starts at a known
        later time."""
        decision = self._decide(job)
        if isinstance(decision, policy.Start):
            yield Counterfactual(f"starts now {words}", self._now)
        if not isinstance(decision, policy.Wait):
            return
        room_is_made = decision.reason.code == "room_is_made"
        at = self._played(job) if room_is_made or later else None
        if at is None:
            return
        if not room_is_made:
            yield Counterfactual(f"starts earlier {words}", at)
            return
        verb = "has" if len(decision.blocked_by) == 1 else "have"
        others = jobs(decision.blocked_by)
        yield Counterfactual(f"starts {words} once {others} {verb} released slots", at)

    def _played(self, job: WaitingJob) -> datetime | None:
        """Return the job's start time; None if it depends on a job of unknown length."""
        there = self._with(job).paced(ranges.SHARES[ranges.MIDDLE])
        play = Simulation(there, self._now, only=job.job_id, max_plans=MAX_PLANS)
        found = play.run()[job.job_id]
        return None if play.has_run_out or found.num_assumed else found.at

    def _decide(self, job: WaitingJob) -> policy.Decision:
        return next(each for each in self._plan(job) if each.job_id == job.job_id)

    def _plan(self, job: WaitingJob) -> list[policy.Decision]:
        snapshot = replace(self._snapshot, queue=(*self._snapshot.queue, job))
        elastic = snapshot.elastic.get(job.job_id)
        if elastic is not None and job is not self.job:
            least, most = job.request.least, job.request.num_workers
            sized = {job.job_id: replace(elastic, least=least, most=most)}
            snapshot = replace(snapshot, elastic={**snapshot.elastic, **sized})
        return policy.plan(snapshot, self._now)


def _of_worker(name: str, unit: float, units: int) -> Change:
    return Change(of_worker=(name, units * unit))
