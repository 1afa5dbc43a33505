"""The limits of queues and of their users: how many workers a job may have, whatever is free.

A job that waits keeps its place under the limits, too: jobs behind it, for which the same limits
count, get none of the room that it waits for. A user's limit never keeps back another user's jobs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.scheduling.obstacles import MAX_NAMED
from service.domain.scheduling.queues import Queue, amounts, spoken
from service.domain.scheduling.slots import EPSILON, Holder, Request, count, needs

QUEUE_LIMIT = "queue_limit"
USER_LIMIT = "user_limit"
BUDGET_USED_UP = "budget_used_up"
HELD = "held"


class Claimant(Protocol):
    """A waiting job, or a group that could use more slots."""

    @property
    def job_id(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def request(self) -> Request: ...


@dataclass(frozen=True)
class Room:
    """How many workers a job may have, and the limit that leaves no more."""

    workers: int
    code: str = ""
    message: str = ""
    holders: tuple[str, ...] = ()
    """Jobs that hold what the limit counts, of many the first."""


UNLIMITED = Room(1 << 40)


@dataclass
class _Use:
    """The jobs and resources that count towards the limits of a queue, or of one of its users."""

    holds: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, None] = field(default_factory=dict)
    """Those that hold slots."""
    ahead: dict[str, float] = field(default_factory=dict)
    """Resources that waiting jobs which come first will hold."""
    num_ahead: int = 0


@dataclass(frozen=True)
class _Scope:
    """The limits of a queue, or of one of its users, and the words for them."""

    code: str
    amounts: Mapping[str, float]
    max_running: int | None
    holder: str
    """Subject of the sentence on what is held."""
    where: str
    limit: str
    use: _Use


class QueueLimits:
    """The room that is left under the limits while one plan is made."""

    def __init__(
        self,
        queues: Iterable[Queue],
        holders: Iterable[Holder] = (),
        standing_by: Iterable[tuple[Claimant, int]] = (),
        used_up: Mapping[str, str] | None = None,
    ) -> None:
        """standing_by: groups and the workers that they lack, whose places stay theirs. used_up:
        by queue, why no more of its jobs start, since its budget is used up."""
        self._used_up = used_up or {}
        self._queues = {queue.name: queue for queue in queues}
        self._uses: dict[tuple[str, str | None], _Use] = {}
        self._scopes_of: dict[tuple[str, str], tuple[_Scope, _Scope]] = {}
        for holder in holders:
            held = amounts(holder.bundle, count(holder.slices))
            self._add(holder.queue, holder.owner, holder.job_id, held)
        for group, lacking in standing_by:
            self.take(group, lacking)

    def room(self, job: Claimant, least: int) -> Room:
        """The workers that all limits leave to the job, beside those that it has. If these are
        fewer than `least`, and the user's limit is one reason, then that is the one told: it keeps
        back nobody else."""
        if job.queue in self._used_up:
            return Room(0, BUDGET_USED_UP, self._used_up[job.queue])
        rooms = [_room(scope, job) for scope in self._scopes(job)]
        too_few = (room for room in rooms if room.workers < least)
        return next(too_few, None) or min(rooms, key=lambda room: room.workers)

    def take(self, job: Claimant, num_workers: int) -> None:
        """The job gets so many workers."""
        held = amounts(job.request.bundle, num_workers)
        self._add(job.queue, job.owner, job.job_id, held)

    def keep_place(self, job: Claimant, num_workers: int, under: Room = UNLIMITED) -> None:
        """The job waits for so many workers, for want of slots or `under` a limit."""
        for scope in self._scopes(job):
            if under.code == USER_LIMIT and scope.code != USER_LIMIT:
                continue
            _sum(scope.use.ahead, amounts(job.request.bundle, num_workers))
            scope.use.num_ahead += job.job_id not in scope.use.jobs

    def _add(self, queue: str, owner: str, job_id: str, held: Mapping[str, float]) -> None:
        for use in (self._use(queue, owner), self._use(queue, None)):
            _sum(use.holds, held)
            use.jobs[job_id] = None

    def _use(self, queue: str, owner: str | None) -> _Use:
        return self._uses.setdefault((queue, owner), _Use())

    def _scopes(self, job: Claimant) -> tuple[_Scope, _Scope]:
        key = job.queue, job.owner
        if key not in self._scopes_of:
            self._scopes_of[key] = self._made(*key)
        return self._scopes_of[key]

    def _made(self, name: str, owner: str) -> tuple[_Scope, _Scope]:
        # A queue without a row is one of a release that did not know rules.
        queue = self._queues.get(name) or Queue(name)
        of_user = _Scope(
            USER_LIMIT,
            *(queue.user_limit, queue.max_running_per_user, owner),
            *(f" in the queue {name!r}", "its limit for a user is"),
            self._use(name, owner),
        )
        of_queue = _Scope(
            QUEUE_LIMIT,
            *(queue.limit, queue.max_running, f"the queue {name!r}", "", "its limit is"),
            self._use(name, None),
        )
        return of_user, of_queue


def _room(scope: _Scope, job: Claimant) -> Room:
    use, most = scope.use, scope.max_running
    if most is None and not scope.amounts:
        return UNLIMITED
    named = itertools.islice(use.jobs, MAX_NAMED + 1)
    holders = tuple(other for other in named if other != job.job_id)[:MAX_NAMED]
    if most is not None and job.job_id not in use.jobs and len(use.jobs) + use.num_ahead >= most:
        runs = f"runs {_jobs(len(use.jobs))}"
        return Room(0, scope.code, _message(scope, runs, f"{most}", use.num_ahead > 0), holders)
    found = UNLIMITED
    for name, each in amounts(job.request.bundle, 1).items():
        if name not in scope.amounts or not each:
            continue
        held, ahead = use.holds.get(name, 0.0), use.ahead.get(name, 0.0)
        workers = max(0, math.floor((scope.amounts[name] - held - ahead + EPSILON) / each))
        if workers < found.workers:
            limit = spoken(name, scope.amounts[name])
            message = _message(scope, f"holds {spoken(name, held)}", limit, ahead > 0)
            found = Room(workers, scope.code, message, holders)
    return found


def _message(scope: _Scope, has: str, limit: str, is_any_ahead: bool) -> str:
    """`the queue 'night' holds 7 GPU, its limit is 8 GPU`."""
    ahead = ", and jobs ahead wait for the rest" if is_any_ahead else ""
    return f"{scope.holder} {has}{scope.where}, {scope.limit} {limit}{ahead}"


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _sum(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount


def why_never(queue: Queue, request: Request) -> str | None:
    """Why the queue's limits never allow a job of this request; None if they do at times."""
    least = amounts(request.bundle, request.least)
    limits = ((queue.limit, "has a limit of"), (queue.user_limit, "gives a user no more than"))
    for limit, words in limits:
        for name, most in limit.items():
            if least.get(name, 0.0) > most + EPSILON:
                return (
                    f"{needs(request)}, but the queue {queue.name!r} {words} {spoken(name, most)}"
                )
    return None


def held_message(held_by: str, job_id: str) -> str:
    """Why a held job waits, and how it goes on."""
    return f"is held by {held_by}; `dray release {job_id}` lets it go on"
