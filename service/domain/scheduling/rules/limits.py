"""The limits of queues and their users: how many workers a job may have, regardless of the number
of free slots.

Waiting jobs also count towards the limits: the capacity for which a job waits is not available to
later jobs under the same limits. A user's limit never blocks another user's jobs.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from service.domain.scheduling.placement.gangs import WorkerKind
from service.domain.scheduling.placement.phrases import needs, spoken
from service.domain.scheduling.placement.slots import (
    EPSILON,
    Holder,
    Node,
    Request,
    amounts,
    amounts_of,
)
from service.domain.scheduling.rules.lending import Lending
from service.domain.scheduling.rules.obstacles import MAX_NAMED, Reason
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.shares import Account
from service.domain.scheduling.rules.tree import QueueTree

QUEUE_LIMIT = "queue_limit"
LENDING_LIMIT = "lending_limit"
USER_LIMIT = "user_limit"
BUDGET_USED_UP = "budget_used_up"
HELD = "held"


Height = tuple[int, bool]
"""How far a queue is above the job's queue, and whether the limit is for the whole queue, not for
each user."""


@dataclass(frozen=True)
class Headroom:
    """The number of workers that a job may have, and the limit that determines this number."""

    workers: int
    code: str = ""
    message: str = ""
    holders: tuple[str, ...] = ()
    """The first few of the jobs that hold the limited resources."""
    height: Height = (1 << 40, True)
    """The height of the scope whose limit this is. Only the limits up to it count the workers for
    which a job waits."""
    _reasons: dict[str, Reason] = field(default_factory=dict, compare=False, repr=False)

    def reason(self, sentence: str) -> Reason:
        """Return the reason why a job gets no more workers. The result is cached, because many jobs
        wait for the same reason. `sentence` describes what the job needs."""
        found = self._reasons.get(sentence)
        if found is None:
            found = Reason(self.code, f"{sentence}; {self.message}")
            self._reasons[sentence] = found
        return found


UNLIMITED = Headroom(1 << 40)


_Counted = list[tuple[str, float]]


@dataclass
class _Use:
    """The jobs and resources that count towards the limits of a queue or of one of its users."""

    holds: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, None] = field(default_factory=dict)
    """Jobs that hold slots."""
    ahead: dict[str, float] = field(default_factory=dict)
    """Resources that waiting jobs ahead in the queue will hold."""
    num_ahead: int = 0
    shared: dict[str | None, Headroom] = field(default_factory=dict)
    """The headroom of a job that doesn't hold any resources yet, keyed by resource. Cached until a
    job gets resources."""


@dataclass(frozen=True)
class _Scope:
    """The limits of a queue or of one of its users, and the wording of their messages."""

    code: str
    amounts: Mapping[str, float]
    max_running: int | None
    holder: str
    """Subject of the message about the held resources, such as `the queue 'night'`."""
    where: str
    limit: str
    allows: str
    use: _Use
    height: Height
    borrowing: Mapping[str, float]
    """The borrowing limit, where it is what limits the queue."""
    _counted: dict[WorkerKind, _Counted] = field(default_factory=dict, compare=False, repr=False)

    def counted(self, kind: WorkerKind) -> _Counted:
        """Return the limited resources of a worker."""
        found = self._counted.get(kind)
        if found is None:
            found = [(name, each) for name, each in kind.counted if each and name in self.amounts]
            self._counted[kind] = found
        return found


class AccountLimits:
    """The limits for the jobs of one user in one queue. The limits of the user are checked first,
    then the limits of the queue, and then the limits of the queues above it."""

    def __init__(
        self,
        queue: str,
        scopes: Sequence[_Scope],
        closed: Headroom | None = None,
        lending: Lending | None = None,
    ) -> None:
        """`closed` is the headroom of every job if no job is allowed to start."""
        self._queue = queue
        self._scopes = scopes
        self._closed = closed
        self._lending = lending
        self._limiting: dict[WorkerKind, list[tuple[_Scope, _Counted]]] = {}
        self._most_ever: dict[WorkerKind, int] = {}

    def headroom(self, job_id: str, kind: WorkerKind, least: int) -> Headroom:
        """Return how many additional workers a job may have under all limits. If the limits allow
        fewer than `least` workers and a user's limit is one of the reasons, the headroom names this
        limit, because it doesn't block other users."""
        if self._closed is not None:
            return self._closed
        most = UNLIMITED.workers
        for scope, counted in self._limits_of(kind):
            workers, resource = _left(scope, job_id, counted)
            if workers < least:
                return _never(scope, counted, least) or _headroom(scope, job_id, workers, resource)
            most = min(most, workers)
        return UNLIMITED if most == UNLIMITED.workers else Headroom(most)

    def allows(self, job_id: str, kind: WorkerKind, num_workers: int) -> bool:
        """Whether the job may have this number of additional workers."""
        return self._closed is None and all(
            _left(scope, job_id, counted)[0] >= num_workers
            for scope, counted in self._limits_of(kind)
        )

    def lent(self, kind: WorkerKind, *, soon: bool = False) -> Headroom:
        """Return how many workers of a job fit without slots that other queues keep for themselves
        although they are idle; with `soon`, once the jobs that were asked to leave have left."""
        lending = self._lending
        lent = None if lending is None else lending.workers(self._queue, kind, soon=soon)
        return UNLIMITED if lent is None else Headroom(lent[0], LENDING_LIMIT, lent[1])

    def take(self, job_id: str, kind: WorkerKind, num_workers: int) -> None:
        """Count workers that the job gets."""
        self.add(job_id, [(name, num_workers * each) for name, each in kind.counted])

    def reserve(
        self, job_id: str, kind: WorkerKind, num_workers: int, under: Headroom = UNLIMITED
    ) -> None:
        """Count workers that the job is waiting for, because slots are missing or because of the
        limit in `under`. If the limits were lowered so far that they can never allow the job, it
        is not counted, because it would block all later jobs."""
        if under is not UNLIMITED and num_workers > self._most(kind):
            return
        for scope, counted in self._limits_of(kind):
            if scope.height[0] > under.height[0] or scope.height[1] > under.height[1]:
                continue
            use = scope.use
            for name, each in counted:
                use.ahead[name] = use.ahead.get(name, 0.0) + num_workers * each
            use.num_ahead += job_id not in use.jobs

    def _limits_of(self, kind: WorkerKind) -> list[tuple[_Scope, _Counted]]:
        """Return the scopes that limit workers of this kind, each with the resources of a worker
        that the scope limits."""
        kind = kind.anywhere  # the limits are the same on all nodes
        found = self._limiting.get(kind)
        if found is None:
            of_each = [(scope, scope.counted(kind)) for scope in self._scopes]
            found = [each for each in of_each if each[1] or each[0].max_running is not None]
            self._limiting[kind] = found
        return found

    def _most(self, kind: WorkerKind) -> int:
        """Return how many workers the limits allow if no other job holds any slots."""
        found = self._most_ever.get(kind)
        if found is None:
            allowed = [
                math.floor((scope.amounts[name] + EPSILON) / each)
                for scope, counted in self._limits_of(kind)
                for name, each in counted
            ]
            found = self._most_ever[kind] = min(allowed, default=UNLIMITED.workers)
        return found

    def add(self, job_id: str, held: Iterable[tuple[str, float]]) -> None:
        """Count resources that the job holds."""
        for scope in self._scopes:
            _sum(scope.use.holds, held)
            scope.use.jobs[job_id] = None
            scope.use.shared.clear()


class QueueLimits:
    """Tracks the remaining capacity under the limits while a plan is made."""

    def __init__(
        self,
        queues: Iterable[Queue],
        holders: Sequence[Holder] = (),
        used_up: Mapping[str, str] | None = None,
        lendable: Sequence[Node] | None = None,
    ) -> None:
        """`used_up` maps each queue whose budget is used up to the reason why its jobs don't start.
        `lendable` contains the nodes of `Lending`; None if lending limits are not checked."""
        self._used_up = used_up or {}
        self._tree = QueueTree(queues)
        self.lending = None
        if lendable is not None and self._tree.lent:
            self.lending = Lending(self._tree, lendable, holders)
        self._uses: defaultdict[tuple[str, str | None], _Use] = defaultdict(_Use)
        """The jobs of each queue, and of each user in it."""
        self._of_users: dict[str, list[tuple[int, Queue]]] = {}
        """For each queue, the queues with limits for each user, with their heights."""
        self._of_queues: dict[str, list[_Scope]] = {}
        """The limits of each queue and of the queues above it."""
        self._of_accounts: dict[Account, AccountLimits | None] = {}
        for holder in holders:
            limits = self.of((holder.queue, holder.owner))
            if limits is not None:
                limits.add(holder.job_id, amounts_of(holder.request).items())

    def of(self, account: Account) -> AccountLimits | None:
        """Return the limits of an account; None if it has no limits."""
        try:
            return self._of_accounts[account]
        except KeyError:
            pass
        scopes = [*self._of_user(*account), *self._of_queue(account[0])]
        why = self._used_up.get(account[0])
        closed = None if why is None else Headroom(0, BUDGET_USED_UP, why, height=(-1, False))
        limits = None
        if scopes or closed or self.lending:
            limits = AccountLimits(account[0], scopes, closed, self.lending)
        self._of_accounts[account] = limits
        return limits

    def _of_user(self, name: str, owner: str) -> list[_Scope]:
        rules = self._of_users.get(name)
        if rules is None:
            rules = self._of_users[name] = [
                (height, queue)
                for height, queue in enumerate(self._tree.upwards(name))
                if queue.user_limit or queue.max_running_per_user is not None
            ]
        return [
            _Scope(
                USER_LIMIT,
                *(queue.user_limit, queue.max_running_per_user, owner),
                *(f" in the queue {queue.name!r}", "its limit for a user"),
                *(f"the queue {queue.name!r} allows a user", self._uses[queue.name, owner]),
                *((height, False), {}),
            )
            for height, queue in rules
        ]

    def _of_queue(self, name: str) -> list[_Scope]:
        found = self._of_queues.get(name)
        if found is None:
            line = self._tree.upwards(name)
            found = self._of_queues[name] = [
                _Scope(
                    QUEUE_LIMIT,
                    *(queue.most, queue.max_running, f"the queue {queue.name!r}", "", "its limit"),
                    *(f"the queue {queue.name!r} allows", self._uses[queue.name, None]),
                    *(
                        (height, True),
                        {n: queue.borrowing_limit[n] for n in queue.bound_by_borrowing},
                    ),
                )
                for height, queue in enumerate(line)
                if queue.most or queue.max_running is not None
            ]
        return found


def _left(scope: _Scope, job_id: str, counted: _Counted) -> tuple[int, str | None]:
    """Return how many workers the limits allow, and the resource that limits their number. The
    resource is None if the number of running jobs is the limit."""
    use, most = scope.use, scope.max_running
    if most is not None and job_id not in use.jobs and len(use.jobs) + use.num_ahead >= most:
        return 0, None
    left, resource = UNLIMITED.workers, None
    for name, each in counted:
        rest = scope.amounts[name] - use.holds.get(name, 0.0) - use.ahead.get(name, 0.0)
        workers = max(0, math.floor((rest + EPSILON) / each))
        if workers < left:
            left, resource = workers, name
    return left, resource


def _never(scope: _Scope, counted: _Counted, least: int) -> Headroom | None:
    """Return a headroom of 0 workers if the limits can never allow `least` workers, else None."""
    for name, each in counted:
        most = scope.amounts[name]
        if least * each > most + EPSILON:
            message = f"{scope.allows} {spoken(name, most)} at most"
            return Headroom(0, scope.code, message, height=scope.height)
    return None


def _headroom(scope: _Scope, job_id: str, workers: int, resource: str | None) -> Headroom:
    """Return the headroom under the limits, with a message that explains it."""
    use = scope.use
    is_shared = job_id not in use.jobs and not workers
    if is_shared and resource in use.shared:
        return use.shared[resource]
    named = itertools.islice((other for other in use.jobs if other != job_id), MAX_NAMED)
    if resource is None:
        limit, has = f"{scope.max_running}", f"runs {_jobs(len(use.jobs))}"
        is_any_ahead = use.num_ahead > 0
    else:
        has = f"holds {spoken(resource, use.holds.get(resource, 0.0))}"
        limit = spoken(resource, scope.amounts[resource])
        is_any_ahead = use.ahead.get(resource, 0.0) > EPSILON
    message = _message(scope, has, limit, is_any_ahead, resource)
    headroom = Headroom(workers, scope.code, message, tuple(named), scope.height)
    if is_shared and is_any_ahead:
        use.shared[resource] = headroom
    return headroom


def _message(scope: _Scope, has: str, limit: str, is_any_ahead: bool, resource: str | None) -> str:
    """Return a string such as `the queue 'night' holds 7 GPU, and its limit is 8 GPU`."""
    ahead = "; jobs ahead are also waiting" if is_any_ahead else ""
    if resource is not None and resource in scope.borrowing:
        of = f"its quota and its borrowing limit of {spoken(resource, scope.borrowing[resource])}"
        return f"{scope.holder} {has}{scope.where}, and {of} allow {limit}{ahead}"
    return f"{scope.holder} {has}{scope.where}, and {scope.limit} is {limit}{ahead}"


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _sum(total: dict[str, float], more: Iterable[tuple[str, float]]) -> None:
    for name, amount in more:
        total[name] = total.get(name, 0.0) + amount


def why_never(queue: Queue, request: Request) -> str | None:
    """Return why the queue's limits can never allow this request; None if they can."""
    least = amounts(request.mean_bundle, request.least)
    limits = ((queue.most, "has a limit of"), (queue.user_limit, "allows a user at most"))
    for limit, words in limits:
        for name, most in limit.items():
            if least.get(name, 0.0) > most + EPSILON:
                return (
                    f"{needs(request)}, but the queue {queue.name!r} {words} {spoken(name, most)}"
                )
    return None


def held_message(held_by: str, job_id: str) -> str:
    """Return why a held job waits, and how to release it."""
    return f"is held by {held_by}; `dray release {job_id}` releases it"
