"""Changes that would have a waiting job start: fewer workers, another queue, a higher priority, any
domain of the topology.

Each question is one call of the policy, with the job changed and the others as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ray_workers.shared.contracts import by_bundle
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.simulation import LEAVING_S, Expected, Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.slots import Request, count, fits, free_again, workers
from service.domain.scheduling.placement.unlike import place_unlike
from service.domain.scheduling.policy import RunningJob, WaitingJob
from service.domain.scheduling.rules.limits import QUEUE_LIMIT, USER_LIMIT, why_never
from service.domain.scheduling.rules.obstacles import Reason, jobs
from service.domain.scheduling.rules.queues import Queue

UNSATISFIABLE = "unsatisfiable"
LIMITS = (QUEUE_LIMIT, USER_LIMIT)
MAX_QUEUES = 3
"""Other queues that are tried."""
MAX_SIZES = 2
"""Smaller gangs that are tried."""
MAX_PLANS = 60
"""How often the policy is called for the expected start of a job that was not submitted."""


@dataclass(frozen=True)
class Counterfactual:
    """A job with one thing changed, or with none, and when it would start."""

    message: str
    at: datetime | None
    """When it would start; None if never."""
    num_workers: int | None = None
    queue: str | None = None
    priority: int | None = None


@dataclass(frozen=True)
class Choices:
    """The changes of a job that its user may make."""

    worker_step: int | None = 1
    """The number of workers must be a multiple; None: it can't change."""
    queues: tuple[Queue, ...] = ()
    """Other queues that would take the job."""
    max_priority: int = 100


class JobQuestions:
    """Questions about one job. The situation may hold it, as it was; it counts as given here."""

    def __init__(self, situation: Situation, job: WaitingJob, now: datetime) -> None:
        self.job = job
        self._now = now
        self._situation = situation.without(job.job_id)
        self._nodes, self._topology = situation.nodes, situation.topology
        heads = tuple(self._situation.heads)
        self._snapshot = replace(situation.snapshot, queue=heads, growing=())

    @functools.cached_property
    def decision(self) -> policy.Decision:
        """About the job as it is."""
        return self._decide(self.job)

    def expected(self) -> Expected:
        """When the job starts as it is, by a play of its own."""
        if isinstance(self.decision, policy.Impossible):
            return Expected(None, self.decision.reason)
        snapshot = replace(self._situation.snapshot, queue=self._queue_with_it())
        there = replace(self._situation, snapshot=snapshot)
        play = Simulation(there, self._now, only=self.job.job_id, max_plans=MAX_PLANS)
        found = play.run()[self.job.job_id]
        if found.at is None or not play.has_run_out:
            return found
        number = sum(self._situation.left_out.values())
        message = f"{number} more jobs wait, of which some are ahead of it"
        return Expected(None, Reason("beyond_forecast", message), not_before=found.at)

    def _queue_with_it(self) -> tuple[WaitingJob, ...]:
        """The waiting jobs, and this one at its place among them."""
        queue = self._situation.snapshot.queue
        order = [decision.job_id for decision in self._plan(self.job)]
        behind = set(order[order.index(self.job.job_id) + 1 :])
        at = next((n for n, job in enumerate(queue) if job.job_id in behind), len(queue))
        return (*queue[:at], self.job, *queue[at:])

    def answers(self, choices: Choices, why: Reason) -> list[Counterfactual]:
        """Changes with which the job starts earlier. why: the reason for which it waits."""
        if why.code == UNSATISFIABLE:
            not_now = Counterfactual(f"not on the cluster as it is: {why.message}", None)
            return [not_now, *self._that_could_ever_start(choices.worker_step)]
        found = [*self._anywhere(), *self._with_fewer_workers(choices.worker_step)]
        # Elsewhere only the limits are others, and the turn of the queue and of its users.
        if why.code in LIMITS or self._situation.favoured(self.job.queue, self.job.owner):
            found += self._in_other_queues(choices.queues)
        return [*found, *self._at_higher_priority(choices.max_priority)]

    def _that_could_ever_start(self, step: int | None) -> Iterator[Counterfactual]:
        number = self._most_workers({node.id: node.total for node in self._nodes}, step)
        if number:
            message = f"could start at some time with {workers(number)}"
            yield Counterfactual(message, None, num_workers=number)

    def _anywhere(self) -> Iterator[Counterfactual]:
        request = self.job.request
        if request.required_level is not None:
            anywhere = replace(self.job, request=replace(request, required_level=None))
            found = self._soon(self._decide(anywhere), "without required_topology")
            if found is not None:
                yield found

    def _with_fewer_workers(self, step: int | None) -> Iterator[Counterfactual]:
        free = {node.id: node.available_to_us for node in self._nodes}
        number = self._most_workers(free, step)
        for _ in range(MAX_SIZES if number else 0):
            smaller = replace(self.job.request, num_workers=number, min_workers=None)
            if isinstance(self._decide(replace(self.job, request=smaller)), policy.Start):
                message = f"starts now with {workers(number)}"
                yield Counterfactual(message, self._now, num_workers=number)
                return
            number = number // 2 // (step or 1) * (step or 1)
            if not number:
                return

    def _most_workers(self, there: Mapping[str, Mapping[str, float]], step: int | None) -> int:
        """The most workers, fewer than the job needs, that have room on these nodes; 0 if none
        have."""
        request = self.job.request
        if request.roles:
            return 0  # how many of them would have which role is not known
        room = self._room(request, there)
        return 0 if step is None else min(room, request.least - 1) // step * step

    def _room(self, request: Request, there: Mapping[str, Mapping[str, float]]) -> int:
        """How many workers have room where they may be together; there: by node, its resources."""
        if request.roles:
            return count(place_unlike(request, there, self._topology))
        sizes = {node_id: fits(request.bundle, has) for node_id, has in there.items()}
        return self._topology.together(sizes, request.required_level)

    def _in_other_queues(self, queues: Sequence[Queue]) -> Iterator[Counterfactual]:
        others = [queue for queue in queues if queue.name != self.job.queue]
        usable = [queue for queue in others if why_never(queue, self.job.request) is None]
        for queue in usable[:MAX_QUEUES]:
            priority = min(self.job.priority, queue.max_priority)
            moved = replace(self.job, queue=queue.name, priority=priority, place=0)
            found = self._soon(self._decide(moved), f"in queue {queue.name!r}")
            if found is not None:
                yield replace(found, queue=queue.name)

    def _at_higher_priority(self, most: int) -> Iterator[Counterfactual]:
        """At the lowest priority above those of all others that wait, if the user may have it."""
        others = (job.priority for job in self._snapshot.queue)
        priority = min(most, max(others, default=self.job.priority) + 1)
        if priority <= self.job.priority:
            return
        raised = replace(self.job, priority=priority, place=0)
        decision, words = self._decide(raised), f"at priority {priority}"
        found = self._soon(decision, words)
        if found is None and isinstance(decision, policy.Wait) and decision.position == 1:
            at = self._first_fit(raised.request)
            if at is not None:
                found = Counterfactual(f"expected to start {self._time(at)} {words}", at)
        if found is not None:
            yield replace(found, priority=priority)

    def _soon(self, decision: policy.Decision, words: str) -> Counterfactual | None:
        if isinstance(decision, policy.Start):
            return Counterfactual(f"starts now {words}", self._now)
        if isinstance(decision, policy.Wait) and decision.reason.code == "room_is_made":
            verb = "has" if len(decision.blocked_by) == 1 else "have"
            message = f"starts {words} once {jobs(decision.blocked_by)} {verb} made room"
            return Counterfactual(message, self._now + timedelta(seconds=LEAVING_S))
        return None

    def _time(self, at: datetime) -> str:
        day = "" if at.date() == self._now.date() else f"on {at:%Y-%m-%d} "
        return f"{day}at {at:%H:%M} UTC"

    def _first_fit(self, request: Request) -> datetime | None:
        """When so many running jobs have ended that the first of the queue fits; None where that
        takes one of which nobody knows how long it has left."""
        nodes = {node.id: node for node in self._nodes}
        free = {node.id: dict(node.available_to_us) for node in self._nodes}
        for left_s, running in self._ends():
            of_job = running.request
            for part, bundle in by_bundle(running.slices, of_job.bundle, of_job.roles):
                if part.node_id in free:
                    node = nodes[part.node_id]
                    free_again(free[part.node_id], node, bundle, part.num_workers)
            if self._room(request, free) >= request.least:
                return self._now + timedelta(seconds=left_s)
        return None

    def _ends(self) -> list[tuple[float, RunningJob]]:
        """Running jobs whose end is known, the first to end first, with the seconds until then."""
        limits = self._situation.runtime_left_s
        ends = [
            (min(job.left_s, limits.get(job.job_id, job.left_s)), job)
            for job in self._snapshot.running
            if job.left_s is not None
        ]
        return sorted(ends, key=lambda end: end[0])

    def _decide(self, job: WaitingJob) -> policy.Decision:
        return next(each for each in self._plan(job) if each.job_id == job.job_id)

    def _plan(self, job: WaitingJob) -> list[policy.Decision]:
        snapshot = replace(self._snapshot, queue=(*self._snapshot.queue, job))
        return policy.plan(snapshot, self._now)
