"""Use cases for queues: list, show, create, change and delete them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.requests import QueueChangeRequest, QueueRequest
from service.costs import spending
from service.costs.prices_file import PricesFile
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import queues as repository
from service.db.session import Database, notify, touch
from service.domain.costs.budgets import with_budget
from service.domain.costs.prices import Prices
from service.domain.errors import InvalidQueue, QueueInUse, QueueNotFound
from service.domain.events import ANONYMOUS
from service.domain.scheduling.rules.queues import DEFAULT, Queue, changed, unfit, unmet_quotas
from service.nodes import node_table
from service.queues import admission

logger = logging.getLogger(__name__)

WITHOUT_PRICES = (
    "the queue has a budget, but no prices are set: the operator can set DRAY_PRICES_FILE"
)


class Queues:
    """Use cases for queues. Each is one transaction. Changes become effective in the scheduler's
    next round."""

    def __init__(
        self,
        database: Database,
        prices: PricesFile,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._prices = prices
        self._clock = clock or database.clock

    async def list(self) -> views.QueuePage:
        """Return all queues, sorted by name."""
        items = await self._database.read(lambda session: _views(session, self._prices_now()))
        return views.QueuePage(items=items)

    async def get(self, name: str) -> views.Queue:
        """Return a queue. Raises QueueNotFound if the queue does not exist."""
        return await self._database.read(lambda session: _view(session, name, self._prices_now()))

    async def put(self, name: str, rules: QueueRequest, *, actor: str = ANONYMOUS) -> views.Queue:
        """Create the queue, or replace its rules. Raise InvalidQueue if the rules contradict each
        other."""

        def work(session: Session) -> views.Queue:
            return _store(session, Queue(name, **rules.model_dump()), self._prices_now())

        view = await self._database.write(work)
        logger.info("the queue %s was set by %s", name, actor)
        return view

    async def change(
        self,
        name: str,
        changes: QueueChangeRequest,
        *,
        create: bool = False,
        actor: str = ANONYMOUS,
    ) -> views.Queue:
        """Change the given rules. Raises QueueNotFound, and raises InvalidQueue in the same cases
        as `put`.

        If `create` is true, create the queue if it does not exist.
        """
        given = changes.model_dump(exclude_unset=True)

        def work(session: Session) -> views.Queue:
            if create:
                repository.add(session, Queue(name))
            queue = changed(_locked(session, name), given)
            return _store(session, queue, self._prices_now())

        view = await self._database.write(work)
        logger.info("the queue %s was changed by %s", name, actor)
        return view

    async def delete(self, name: str, *, actor: str = ANONYMOUS) -> None:
        """Delete the queue. Raises QueueNotFound if the queue does not exist, and QueueInUse if the
        queue is the default queue or has unfinished jobs."""

        def work(session: Session) -> None:
            _locked(session, name)
            _refuse_if_used(session, name)
            touch(session)
            repository.remove(session, name)

        await self._database.write(work)
        logger.info("the queue %s was deleted by %s", name, actor)

    def _prices_now(self) -> PricesNow:
        return PricesNow(self._prices.current(), self._clock())


@dataclass(frozen=True)
class PricesNow:
    """The current prices and time. `current` is None if the deployment has no prices."""

    current: Prices | None
    now: datetime

    def fields(self, session: Session, queues: Sequence[Queue]) -> dict[str, dict[str, Any]]:
        """Return the cost fields of each queue's view."""
        if self.current is None:
            return {}
        names, currency = [queue.name for queue in queues], self.current.currency
        found = spending.of_queues(session, names, currency, self.now)
        return {
            name: {
                "spent": spent.in_all,
                "spent_this_month": spent.this_month,
                "currency": currency,
            }
            for name, spent in found.items()
        }


def _locked(session: Session, name: str) -> Queue:
    queue = repository.lock_alone(session, name)
    if queue is None:
        raise not_found(name)
    return queue


def not_found(name: str) -> QueueNotFound:
    hint = "`dray queue ls` shows the existing queues"
    return QueueNotFound(f"there is no queue {name!r}", hint=hint)


def _store(session: Session, queue: Queue, prices: PricesNow) -> views.Queue:
    wrong = unfit(queue)
    if wrong is not None:
        raise InvalidQueue(wrong.message, pointer=wrong.pointer, hint=wrong.hint)
    repository.put(session, queue)
    touch(session)  # views of jobs don't change until the scheduler's next round
    notify(session, QUEUE)
    return _view(session, queue.name, prices)


def _refuse_if_used(session: Session, name: str) -> None:
    if name == DEFAULT:
        raise QueueInUse(
            f"the queue {DEFAULT!r} can't be deleted: it is used for jobs without a queue"
        )
    number = repository.count_unfinished(session, name)
    if number:
        raise QueueInUse(
            f"{number} job{'' if number == 1 else 's'} in the queue {name!r} "
            f"{'has' if number == 1 else 'have'} not ended",
            hint="move or cancel these jobs first, or wait until they have ended",
        )


def _view(session: Session, name: str, prices: PricesNow) -> views.Queue:
    for view in _views(session, prices, name):
        return view
    raise not_found(name)


def _views(session: Session, prices: PricesNow, only: str | None = None) -> list[views.Queue]:
    """Return all queues with their jobs, or only the queue named `only`."""
    every = repository.every(session)
    shown = [queue for queue in every if only in (None, queue.name)]
    costs = prices.fields(session, shown)
    used = admission.of_users(session, shown, only)
    nodes = node_table.usable(session)
    found = []
    for queue in shown:
        others = [other for other in every if other is not queue]
        unmet = [] if nodes is None else unmet_quotas(queue, others, nodes)
        if prices.current is None and with_budget([queue]):
            unmet.append(("budget_without_prices", WITHOUT_PRICES))
        view = _as_view(queue, used.get(queue.name, []), unmet)
        found.append(view.model_copy(update=costs.get(queue.name, {})))
    return found


def _as_view(
    queue: Queue, users: list[views.QueueUser], unmet: list[tuple[str, str]]
) -> views.Queue:
    return views.Queue(
        **asdict(queue),
        num_waiting=sum(user.num_waiting for user in users),
        num_held=sum(user.num_held for user in users),
        num_running=sum(user.num_running for user in users),
        holds=admission.total(user.holds for user in users),
        users=users,
        warnings=[views.Reason(code=code, message=message) for code, message in unmet],
    )
