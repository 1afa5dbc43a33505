"""The jobs that wait in each queue, and what its running jobs hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sqlalchemy.orm import Session

from dray import views
from service.db.repositories.scheduling import queues as repository
from service.domain.scheduling.placement.slots import amounts_of
from service.domain.scheduling.rules.queues import Queue
from service.lifecycle import resizing


def of_users(
    session: Session, queues: Iterable[Queue], only: str | None = None
) -> dict[str, list[views.QueueUser]]:
    """By queue, each of its users with jobs that wait or hold slots; or those of one queue."""
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
