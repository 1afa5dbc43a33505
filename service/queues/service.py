"""Use cases of queues: list, show, make, change, delete."""

from __future__ import annotations

import logging
from dataclasses import asdict

from sqlalchemy.orm import Session

from dray import views
from dray.requests import QueueChangeRequest, QueueRequest
from service.db.notifications import QUEUE
from service.db.repositories import queues as repository
from service.db.session import Database, notify, touch
from service.domain.errors import InvalidQueue, QueueInUse, QueueNotFound
from service.domain.events import ANONYMOUS
from service.domain.scheduling.queues import DEFAULT, Queue, changed, contradiction, unmet_quotas
from service.nodes import node_table
from service.queues import usage

logger = logging.getLogger(__name__)


class Queues:
    """The use cases. Each is one transaction; changes hold from the scheduler's next round on."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> views.QueuePage:
        """By name."""
        return views.QueuePage(items=await self._database.read(_views))

    async def get(self, name: str) -> views.Queue:
        """QueueNotFound if there is none."""
        return await self._database.read(lambda session: _view(session, name))

    async def put(self, name: str, rules: QueueRequest, *, actor: str = ANONYMOUS) -> views.Queue:
        """Make the queue, or replace its rules. InvalidQueue if the rules contradict each other."""

        def work(session: Session) -> views.Queue:
            return _store(session, Queue(name, **rules.model_dump()))

        view = await self._database.write(work)
        logger.info("the queue %s was set by %s", name, actor)
        return view

    async def change(
        self, name: str, changes: QueueChangeRequest, *, actor: str = ANONYMOUS
    ) -> views.Queue:
        """Change the rules that are given. QueueNotFound, or InvalidQueue as `put`."""
        given = changes.model_dump(exclude_unset=True)

        def work(session: Session) -> views.Queue:
            return _store(session, changed(_locked(session, name), given))

        view = await self._database.write(work)
        logger.info("the queue %s was changed by %s", name, actor)
        return view

    async def delete(self, name: str, *, actor: str = ANONYMOUS) -> None:
        """QueueNotFound; QueueInUse while jobs that have not ended are in it, and of the default
        one."""

        def work(session: Session) -> None:
            _locked(session, name)
            _refuse_if_used(session, name)
            touch(session)
            repository.remove(session, name)

        await self._database.write(work)
        logger.info("the queue %s was deleted by %s", name, actor)


def _locked(session: Session, name: str) -> Queue:
    queue = repository.lock(session, name)
    if queue is None:
        raise _not_found(name)
    return queue


def _not_found(name: str) -> QueueNotFound:
    hint = "`dray queue ls` shows the queues there are"
    return QueueNotFound(f"there is no queue {name!r}", hint=hint)


def _store(session: Session, queue: Queue) -> views.Queue:
    wrong = contradiction(queue)
    if wrong is not None:
        raise InvalidQueue(wrong[1], pointer=wrong[0], hint="raise the limit or lower the quota")
    repository.put(session, queue)
    touch(session)  # what is told of jobs stays as it is until the scheduler has looked
    notify(session, QUEUE)
    return _view(session, queue.name)


def _refuse_if_used(session: Session, name: str) -> None:
    if name == DEFAULT:
        raise QueueInUse(f"the queue {DEFAULT!r} takes the jobs that name none, so it stays")
    number = repository.count_unfinished(session, name)
    if number:
        raise QueueInUse(
            f"{number} job{'' if number == 1 else 's'} in the queue {name!r} "
            f"{'has' if number == 1 else 'have'} not ended",
            hint="move or cancel them first, or wait for their end",
        )


def _view(session: Session, name: str) -> views.Queue:
    for view in _views(session, name):
        return view
    raise _not_found(name)


def _views(session: Session, only: str | None = None) -> list[views.Queue]:
    """All queues, or the one of this name, with the jobs in them."""
    every = repository.every(session)
    used = usage.of_users(session, only)
    nodes = node_table.usable(session)
    found = []
    for queue in every:
        if only in (None, queue.name):
            others = [other for other in every if other is not queue]
            unmet = [] if nodes is None else unmet_quotas(queue, others, nodes)
            found.append(_as_view(queue, used.get(queue.name, []), unmet))
    return found


def _as_view(
    queue: Queue, users: list[views.QueueUser], unmet: list[tuple[str, str]]
) -> views.Queue:
    return views.Queue(
        **asdict(queue),
        num_waiting=sum(user.num_waiting for user in users),
        num_held=sum(user.num_held for user in users),
        num_running=sum(user.num_running for user in users),
        holds=usage.total(user.holds for user in users),
        users=users,
        warnings=[views.Reason(code=code, message=message) for code, message in unmet],
    )
