"""Use case: report the costs of users and queues in a period."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Literal

from sqlalchemy.orm import Session

from dray import views
from service.costs.prices_file import PricesFile
from service.db.models import NodeRow
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import costs as repository
from service.db.session import Database
from service.domain.costs.budgets import month_of
from service.domain.costs.prices import Prices

MAX_NAMED = 5
"""Maximum number of nodes to list in a warning about nodes without a price."""


class Costs:
    """Cost reports from the database."""

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

    async def report(
        self,
        by: Literal["user", "queue"] = "user",
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        owner: str | None = None,
    ) -> views.CostReport:
        """Report the cost of each user or queue, with the highest cost first.

        `since` and `until` default to the beginning of this month (in UTC) and the current time. If
        `owner` is given, only this user's jobs are included.
        """
        now = self._clock()
        since, until = since or month_of(now), until or now

        def work(session: Session) -> views.CostReport:
            column = "owner" if by == "user" else "queue"
            found = repository.between(session, column, since, until, owner=owner)
            prices = self._prices.current()
            items = [_item(name, currency, sum_) for (name, currency), sum_ in found.items()]
            items.sort(key=lambda item: (item.cost.currency, -item.cost.total, item.name))
            return views.CostReport(
                by=by,
                since=since,
                until=until,
                items=items,
                prices=[] if prices is None else _as_views(prices),
                warnings=self._warnings(session, prices),
            )

        return await self._database.read(work)

    def _warnings(self, session: Session, prices: Prices | None) -> list[views.Reason]:
        if prices is None:
            message = "there are no prices: the operator can set them with DRAY_PRICES_FILE"
            return [views.Reason(code="no_prices", message=message)]
        found = []
        if self._prices.problem is not None:
            message = (
                "the prices file can't be used, so the previous prices still apply: "
                f"{self._prices.problem}"
            )
            found.append(views.Reason(code="prices_invalid", message=message))
        free = _without_price(prices, cluster_repository.nodes(session))
        if free:
            more = "" if len(free) <= MAX_NAMED else f" and {len(free) - MAX_NAMED} more"
            message = f"slots are free of charge on {', '.join(free[:MAX_NAMED])}{more}"
            message += ": no price matches their resources and labels"
            found.append(views.Reason(code="nodes_without_price", message=message))
        return found


def _item(name: str, currency: str, sum_: repository.CostSum) -> views.CostItem:
    of = sum_.amounts
    wasted = max(0.0, of["total"] - of["useful"] - of["unreported"])
    return views.CostItem(
        name=name,
        cost=views.Cost(
            currency=currency,
            total=of["total"],
            useful=of["useful"],
            wasted=wasted,
            unreported=of["unreported"],
        ),
        slot_hours=of["slot_seconds"] / 3600,
        num_jobs=sum_.num_jobs,
    )


def _as_views(prices: Prices) -> list[views.Price]:
    return [
        views.Price(
            resource=rule.resource,
            per_hour=rule.per_hour,
            currency=prices.currency,
            labels=dict(rule.labels),
        )
        for rule in prices.rules
    ]


def _without_price(prices: Prices, nodes: list[NodeRow]) -> list[str]:
    """Return the host names of nodes that can run ranks but have no price."""
    return [
        node.hostname
        for node in nodes
        if node.accepted
        and all(prices.rule(name, node.labels) is None for name in ("slot", *node.total))
    ]
