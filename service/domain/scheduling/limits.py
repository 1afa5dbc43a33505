"""The limits of queues and of their users: how many workers a job may have, whatever is free.

A job that waits keeps its place under the limits, too: jobs behind it, for which the same limits
count, get none of the room that it waits for. A user's limit never keeps back another user's jobs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from service.domain.scheduling.gangs import WorkerKind
from service.domain.scheduling.obstacles import MAX_NAMED
from service.domain.scheduling.queues import Queue, amounts, spoken
from service.domain.scheduling.shares import Account
from service.domain.scheduling.slots import EPSILON, Holder, Request, count, needs

QUEUE_LIMIT = "queue_limit"
USER_LIMIT = "user_limit"
HELD = "held"


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

    @property
    def limits_nothing(self) -> bool:
        return self.max_running is None and not self.amounts


class QueueLimits:
    """The room that is left under the limits while one plan is made."""

    def __init__(self, queues: Iterable[Queue], holders: Iterable[Holder] = ()) -> None:
        self._queues = {queue.name: queue for queue in queues}
        self._uses: dict[tuple[str, str | None], _Use] = {}
        self._scopes_of: dict[Account, tuple[_Scope, ...]] = {}
        for holder in holders:
            account = holder.queue, holder.owner
            if self._scopes(account):
                held = amounts(holder.bundle, count(holder.slices))
                self._add(account, holder.job_id, held.items())

    def room(self, account: Account, job_id: str, kind: WorkerKind, least: int) -> Room:
        """The workers that all limits leave to a job of this queue and user, beside those that it
        has. If these are fewer than `least`, and the user's limit is one reason, then that is the
        one told: it keeps back nobody else."""
        most = UNLIMITED.workers
        for scope in self._scopes(account):
            workers, resource = _left(scope, job_id, kind)
            if workers < least:
                return _told(scope, job_id, workers, resource)
            most = min(most, workers)
        return Room(most)

    def take(self, account: Account, job_id: str, kind: WorkerKind, num_workers: int) -> None:
        """The job gets so many workers."""
        if self._scopes(account):
            self._add(account, job_id, [(name, num_workers * each) for name, each in kind.counted])

    def keep_place(
        self,
        account: Account,
        job_id: str,
        kind: WorkerKind,
        num_workers: int,
        under: Room = UNLIMITED,
    ) -> None:
        """The job waits for so many workers, for want of slots or `under` a limit."""
        for scope in self._scopes(account):
            if under.code == USER_LIMIT and scope.code != USER_LIMIT:
                continue
            _sum(scope.use.ahead, [(name, num_workers * each) for name, each in kind.counted])
            scope.use.num_ahead += job_id not in scope.use.jobs

    def _add(self, account: Account, job_id: str, held: Iterable[tuple[str, float]]) -> None:
        for scope in self._scopes(account):
            _sum(scope.use.holds, held)
            scope.use.jobs[job_id] = None

    def _scopes(self, account: Account) -> tuple[_Scope, ...]:
        """Those that limit anything, the user's first."""
        scopes = self._scopes_of.get(account)
        if scopes is None:
            made = self._made(*account)
            scopes = tuple(scope for scope in made if not scope.limits_nothing)
            self._scopes_of[account] = scopes
        return scopes

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

    def _use(self, queue: str, owner: str | None) -> _Use:
        return self._uses.setdefault((queue, owner), _Use())


def _left(scope: _Scope, job_id: str, kind: WorkerKind) -> tuple[int, str | None]:
    """How many workers the limits leave, and the resource that leaves no more; None of the number
    of jobs."""
    use, most = scope.use, scope.max_running
    if most is not None and job_id not in use.jobs and len(use.jobs) + use.num_ahead >= most:
        return 0, None
    left, resource = UNLIMITED.workers, None
    for name, each in kind.counted:
        if each and name in scope.amounts:
            rest = scope.amounts[name] - use.holds.get(name, 0.0) - use.ahead.get(name, 0.0)
            workers = max(0, math.floor((rest + EPSILON) / each))
            if workers < left:
                left, resource = workers, name
    return left, resource


def _told(scope: _Scope, job_id: str, workers: int, resource: str | None) -> Room:
    """What the limits leave, in words."""
    use = scope.use
    named = itertools.islice(use.jobs, MAX_NAMED + 1)
    holders = tuple(other for other in named if other != job_id)[:MAX_NAMED]
    if resource is None:
        message = _message(
            scope, f"runs {_jobs(len(use.jobs))}", f"{scope.max_running}", use.num_ahead > 0
        )
    else:
        has = f"holds {spoken(resource, use.holds.get(resource, 0.0))}"
        limit = spoken(resource, scope.amounts[resource])
        message = _message(scope, has, limit, use.ahead.get(resource, 0.0) > 0)
    return Room(workers, scope.code, message, holders)


def _message(scope: _Scope, has: str, limit: str, is_any_ahead: bool) -> str:
    """`the queue 'night' holds 7 GPU, its limit is 8 GPU`."""
    ahead = ", and jobs ahead wait for the rest" if is_any_ahead else ""
    return f"{scope.holder} {has}{scope.where}, {scope.limit} {limit}{ahead}"


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _sum(total: dict[str, float], more: Iterable[tuple[str, float]]) -> None:
    for name, amount in more:
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
