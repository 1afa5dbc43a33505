"""Checks whether a queue admits a job, and lists the users of queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy.orm import Session

from dray import views
from dray.input.names import nearest
from service.db.repositories.scheduling import queues as repository
from service.domain.errors import (
    PriorityTooHigh,
    QueueFull,
    QueueHoldsNoJobs,
    RuntimeTooLong,
    UnknownQueue,
    Unsatisfiable,
)
from service.domain.scheduling.placement.slots import Request, amounts_of
from service.domain.scheduling.rules.limits import why_never
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.tree import QueueTree
from service.lifecycle import resizing

MAX_NAMED = 20
"""Maximum number of queues that an error message lists."""

Coming = Mapping[str | None, int]
"""The numbers of jobs that a queue must accept, keyed by the queue in which they wait now; None for
new jobs."""


def admit(session: Session, name: str, owner: str, request: Request, coming: Coming) -> Queue:
    """Lock the queue, and check that it admits these jobs of the owner. `coming` is empty if the
    job is already waiting in the queue.

    Raises UnknownQueue if the queue does not exist, QueueHoldsNoJobs if it is the parent of other
    queues, Unsatisfiable if its limits or the limits of a queue above it can never allow the job,
    and QueueFull if too many jobs would be waiting. Returns the queue as `locked` does.
    """
    line, is_parent = _locked_line(session, name)
    if is_parent:
        children = repository.children(session, name)
        listed = ", ".join(children[:MAX_NAMED]) + (
            " and more" if len(children) > MAX_NAMED else ""
        )
        raise QueueHoldsNoJobs(
            f"the queue {name!r} is the parent of other queues, so it can't hold jobs",
            pointer="/queue",
            hint=f"choose a queue under it: {listed}",
        )
    for queue in line:
        never = why_never(queue, request)
        if never is not None:
            hint = (
                "choose another queue, or request fewer resources; "
                f"`dray queue show {queue.name}` shows the queue's rules"
            )
            raise Unsatisfiable(f"this job could never start: {never}", pointer="/queue", hint=hint)
    refuse_if_full(session, line, owner, coming)
    return QueueTree(line).combined(name)


def locked(session: Session, name: str) -> Queue:
    """Lock the queue and the queues above it. Return the queue with the rules for priorities and
    running times that result from all of them. Raises UnknownQueue if the queue does not exist.

    Until this transaction ends, no other transaction can delete or change these queues. If one of
    them limits the number of waiting jobs, no other transaction can add jobs under it either.
    """
    return QueueTree(_locked_line(session, name)[0]).combined(name)


def _locked_line(session: Session, name: str) -> tuple[list[Queue], bool]:
    """Return the queue and the queues above it, and whether the queue has children."""
    found = repository.lock(session, name)
    if found is None:
        raise _unknown(session, name)
    line = [found[0]]
    while line[-1].parent is not None:
        above = repository.lock(session, line[-1].parent)
        if above is None:
            break
        line.append(above[0])
    return line, found[1]


def _unknown(session: Session, name: str) -> UnknownQueue:
    names = [queue.name for queue in repository.every(session)]
    listed = ", ".join(names[:MAX_NAMED]) + (" and more" if len(names) > MAX_NAMED else "")
    are = "the only queue is" if len(names) == 1 else "the queues are"
    return UnknownQueue(
        f"there is no queue {name!r}; {are} {listed}",
        pointer="/queue",
        hint=nearest(name, names) or "`dray queue set` creates a queue",
    )


def refuse_if_full(session: Session, line: Sequence[Queue], owner: str, coming: Coming) -> None:
    """Raise QueueFull if too many jobs would be waiting after these jobs of the owner are added.
    `line` contains the queue and the queues above it. If a job moves between two queues that are
    both under another queue, it already counts as waiting in that other queue."""
    for queue in line if coming else ():
        if queue.max_queued is None and queue.max_queued_per_user is None:
            continue
        names = [queue.name]
        if queue is not line[0]:
            names = QueueTree(repository.every(session)).under(queue.name)
        num_jobs = sum(number for name, number in coming.items() if name not in names)
        if num_jobs:
            _refuse_if_one_is_full(session, queue, names, owner, num_jobs)


def _refuse_if_one_is_full(
    session: Session, queue: Queue, names: Sequence[str], owner: str, num_jobs: int
) -> None:
    """`names` contains the queue and the queues under it, whose jobs count."""
    bounds = (
        (queue.max_queued, None, "the queue accepts"),
        (queue.max_queued_per_user, owner, "a user may have"),
    )
    for most, of, words in bounds:
        if most is None:
            continue
        number = repository.count_waiting(session, names, of)
        if number + num_jobs <= most:
            continue
        whose = "" if of is None else f" of {of}"
        wait = f"1 job{whose} waits" if number == 1 else f"{number} jobs{whose} wait"
        most_of = (
            f"which is the maximum that {words}"
            if number == most
            else f"and {num_jobs} more would exceed the maximum of {most} that {words}"
        )
        raise QueueFull(
            f"{wait} in the queue {queue.name!r}, {most_of}",
            pointer="/queue",
            hint=(
                "submit fewer jobs, or choose another queue"
                if num_jobs > most
                else "wait until one of the waiting jobs has started, or choose another queue"
            ),
        )


def refuse_priority(queue: Queue, priority: int) -> None:
    """Raise PriorityTooHigh if the priority is above the maximum that users can set in this
    queue."""
    if priority > queue.max_priority:
        raise PriorityTooHigh(
            f"is {priority}, but the maximum of {_named(queue)} is {queue.max_priority}",
            pointer="/priority",
            hint="an admin can raise the job's priority after its submission",
        )


def _named(queue: Queue) -> str:
    above = "" if queue.parent is None else " and the queues above it"
    return f"the queue {queue.name!r}{above}"


def limit_in(
    queue: Queue, own_s: int | None, used_s: float = 0.0, *, pointer: str = "/max_runtime_s"
) -> int | None:
    """Return the limit of a job's running time in this queue: its own limit `own_s`, or the queue's
    default. Raises RuntimeTooLong if the queue does not allow the limit, or if the job, which has
    run for `used_s`, has already reached the default."""
    most_s = queue.max_runtime_s
    if own_s is not None and most_s is not None and own_s > most_s:
        raise RuntimeTooLong(
            f"is {own_s} s, but the maximum of {_named(queue)} is {most_s} s",
            pointer=pointer,
            hint=f"set max_runtime_s to at most {most_s}, or choose another queue",
        )
    limit_s = queue.default_limit_s if own_s is None else own_s
    if own_s is None and limit_s is not None and used_s >= limit_s:
        raise RuntimeTooLong(
            f"the job has already run for {used_s:.0f} s, but jobs without max_runtime_s can run "
            f"for {limit_s} s in the queue {queue.name!r}",
            pointer=pointer,
            hint="choose another queue",
        )
    return limit_s


def of_users(
    session: Session, queues: Iterable[Queue], only: Sequence[str] | None = None
) -> dict[str, list[views.QueueUser]]:
    """Return the users who have waiting jobs or jobs with slots, keyed by queue. If `only` is
    given, return only the users of these queues."""
    rules = {queue.name: queue for queue in queues}
    waiting = {(row[0], row[1]): (row[2], row[3]) for row in repository.waiting(session, only)}
    held: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for name, owner, *slots in repository.running(session, only):
        held[name, owner].append(amounts_of(resizing.held_request(*slots)))
    users: dict[str, list[views.QueueUser]] = {}
    for name, owner in sorted({*waiting, *held}):
        num_waiting, num_held = waiting.get((name, owner), (0, 0))
        running = held.get((name, owner), [])
        user = views.QueueUser(
            owner=owner,
            weight=rules.get(name, Queue(name)).weight_of(owner),
            num_waiting=num_waiting,
            num_held=num_held,
            num_running=len(running),
            holds=total(running),
        )
        users.setdefault(name, []).append(user)
    return users


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            found[name] = found.get(name, 0.0) + amount
    return found
