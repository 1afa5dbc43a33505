"""Use cases for queues: list, show, create, change and delete them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.queue_requests import QueueChangeRequest, QueueRequest
from service.costs import spending
from service.costs.prices_file import PricesFile
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import queues as repository
from service.db.session import Database, notify, touch
from service.domain.costs.budgets import with_budget
from service.domain.costs.prices import Prices
from service.domain.errors import InvalidQueue, QueueInUse, QueueNotFound
from service.domain.events import ANONYMOUS
from service.domain.scheduling.rules.queues import DEFAULT, Queue, changed, unfit
from service.domain.scheduling.rules.tree import QueueTree, unmet_quotas
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
        """Create the queue, or replace its rules. Raises InvalidQueue if the rules contradict each
        other or the rules of the queues above or below it."""

        def work(session: Session) -> views.Queue:
            repository.lock_tree(session)
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
            repository.lock_tree(session)
            if create:
                repository.add(session, Queue(name))
            queue = changed(_locked(session, name), given)
            return _store(session, queue, self._prices_now())

        view = await self._database.write(work)
        logger.info("the queue %s was changed by %s", name, actor)
        return view

    async def delete(self, name: str, *, actor: str = ANONYMOUS) -> None:
        """Delete the queue. Raises QueueNotFound if the queue does not exist, and QueueInUse if the
        queue is the default queue or has unfinished jobs or children."""

        def work(session: Session) -> None:
            repository.lock_tree(session)
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

    def fields(
        self, session: Session, tree: QueueTree, queues: Sequence[Queue]
    ) -> dict[str, dict[str, Any]]:
        """Return the cost fields of each queue's view."""
        if self.current is None:
            return {}
        names, currency = [queue.name for queue in queues], self.current.currency
        found = spending.with_those_under(session, tree, names, currency, self.now)
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
    tree = QueueTree([*repository.every(session), queue])
    wrong = unfit(queue) or tree.misplaced(queue.name) or tree.overcommitted(queue.name)
    if wrong is not None:
        raise InvalidQueue(wrong.message, pointer=wrong.pointer, hint=wrong.hint)
    if queue.parent is not None:
        _refuse_if_parent_holds_jobs(session, queue.parent)
    repository.put(session, queue)
    touch(session)  # views of jobs don't change until the scheduler's next round
    notify(session, QUEUE)
    return _view(session, queue.name, prices)


def _refuse_if_parent_holds_jobs(session: Session, parent: str) -> None:
    repository.lock_alone(session, parent)  # submissions to the parent wait
    number = repository.count_unfinished(session, parent)
    if number:
        raise InvalidQueue(
            f"{_jobs(number)} in the queue {parent!r} {_have(number)} not ended, "
            "but a parent queue can't hold jobs",
            pointer="/parent",
            hint="move or cancel these jobs first, or choose another parent",
        )


def _refuse_if_used(session: Session, name: str) -> None:
    if name == DEFAULT:
        raise QueueInUse(
            f"the queue {DEFAULT!r} can't be deleted: it is used for jobs without a queue"
        )
    number = repository.count_unfinished(session, name)
    if number:
        raise QueueInUse(
            f"{_jobs(number)} in the queue {name!r} {_have(number)} not ended",
            hint="move or cancel these jobs first, or wait until they have ended",
        )
    children = repository.children(session, name)
    if children:
        raise QueueInUse(
            f"the queue {name!r} is the parent of {', '.join(children[: admission.MAX_NAMED])}",
            hint=f"first give them another parent: `dray queue set {children[0]} --parent none`",
        )


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


def _view(session: Session, name: str, prices: PricesNow) -> views.Queue:
    for view in _views(session, prices, name):
        return view
    raise not_found(name)


def _views(session: Session, prices: PricesNow, only: str | None = None) -> list[views.Queue]:
    """Return all queues with their jobs, or only the queue named `only`. The jobs of a parent are
    the jobs of all queues under it."""
    tree = QueueTree(repository.every(session))
    shown = [queue for queue in tree.queues.values() if only in (None, queue.name)]
    costs = prices.fields(session, tree, shown)
    whole = None if only is None else tree.under(tree.path(only)[0])
    users = admission.of_users(session, tree.queues.values(), whole)
    uses = _uses(tree, users)
    nodes = node_table.usable(session)
    found = []
    for queue in shown:
        unmet = [] if nodes is None else unmet_quotas(tree, queue.name, nodes)
        if prices.current is None and with_budget([queue]):
            unmet.append(("budget_without_prices", WITHOUT_PRICES))
        view = views.Queue(
            **asdict(queue),
            **asdict(uses[queue.name]),
            children=sorted(tree.children.get(queue.name, ())),
            allowed=_allowed(tree.upwards(queue.name), uses),
            users=users.get(queue.name, []),
            warnings=[views.Reason(code=code, message=message) for code, message in unmet],
        )
        found.append(view.model_copy(update=costs.get(queue.name, {})))
    return found


@dataclass
class _QueueUse:
    """The jobs of a queue and of all queues under it."""

    num_waiting: int = 0
    num_held: int = 0
    num_running: int = 0
    holds: dict[str, float] = field(default_factory=dict)


def _uses(tree: QueueTree, users: Mapping[str, Sequence[views.QueueUser]]) -> dict[str, _QueueUse]:
    found = {name: _QueueUse() for name in tree.queues}
    for name, of_queue in users.items():
        for use in (found[each] for each in tree.path(name) if each in found):
            for user in of_queue:
                use.num_waiting += user.num_waiting
                use.num_held += user.num_held
                use.num_running += user.num_running
                use.holds = admission.total((use.holds, user.holds))
    return found


def _allowed(line: Sequence[Queue], uses: Mapping[str, _QueueUse]) -> list[views.QueueBound]:
    """For each resource that is limited by the queue or by a queue above it, return the limit that
    leaves the least headroom. `line` begins with the queue."""
    found: dict[str, views.QueueBound] = {}
    for queue in line:
        use = uses[queue.name]
        bounds = [
            (name, most, use.holds.get(name, 0.0), _rule(queue, name))
            for name, most in queue.most.items()
        ]
        if queue.max_running is not None:
            bounds.append(("jobs", float(queue.max_running), float(use.num_running), "max_running"))
        for name, most, held, rule in bounds:
            left = max(0.0, most - held)
            if name not in found or left < found[name].left:
                found[name] = views.QueueBound(
                    resource=name, left=left, most=most, queue=queue.name, rule=rule
                )
    return list(found.values())


def _rule(queue: Queue, resource: str) -> str:
    return "borrowing_limit" if resource in queue.bound_by_borrowing else "limit"
