"""Accounting: a row for each attempt or job in a period, with the slots that it held and their
cost.

Costs are counted as in `service.costs`: up to the latest report of an attempt and, for a group that
changes its size, by the slots that it held at each point in time. Therefore the rows of adjacent
periods add up to the rows of the whole period.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.filters import AccountingFilter, Time
from service.config.node_types import without_labels
from service.db.repositories.scheduling import accounting as repository
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling.accounting import MAX_ATTEMPT, Period
from service.db.session import Database
from service.domain.costs.budgets import month_of
from service.domain.costs.slot_history import SlotHistory
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor
from service.domain.scheduling.placement.slots import amounts_of
from service.jobs import listing
from service.lifecycle import resizing


class Accounting:
    """Pages of the attempts or jobs that ran, read from the database."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock or database.clock

    async def page(
        self, wanted: AccountingFilter, *, limit: int, cursor: str | None = None
    ) -> views.AccountingPage:
        """Return up to `limit` attempts or jobs. The period of the first page applies to all pages.

        Raises BadCursor if the cursor is not from a page with the same filter.
        """
        scope = f"accounting:{listing.digest(wanted, AccountingFilter)}"
        now = self._clock()
        start = _AfterRow(Period(wanted.since or month_of(now), wanted.until or now))
        position = start if cursor is None else _AfterRow.of(decode_cursor(scope, cursor))
        period = position.period

        def work(session: Session) -> views.AccountingPage:
            items = (
                [] if not listing.can_match(wanted) else _items(session, wanted, position, limit)
            )
            more = None
            if len(items) > limit:
                items.pop()
                attempt = MAX_ATTEMPT if wanted.per == "job" else items[-1].attempt
                last = _AfterRow(period, items[-1].job_id, attempt)
                more = encode_cursor(scope, last.as_json())
            return views.AccountingPage(
                since=period.since, until=period.until, items=items, next_cursor=more
            )

        return await self._database.read(work)


@dataclass(frozen=True)
class _AfterRow:
    """The period, and the last row of the previous page; empty for the first page."""

    period: Period
    job_id: str = ""
    attempt: int = 0

    def as_json(self) -> list[Any]:
        times = (self.period.since.isoformat(), self.period.until.isoformat())
        return [*times, self.job_id, self.attempt]

    @classmethod
    def of(cls, stored: Any) -> _AfterRow:
        try:
            since, until, job_id, attempt = _STORED.validate_python(stored)
        except ValidationError:
            raise BadCursor("the cursor does not belong to this listing") from None
        return cls(Period(since, until), job_id, attempt)


_STORED = TypeAdapter(
    tuple[
        Time,
        Time,
        Annotated[str, Field(pattern="^job-[0-9a-z]{1,60}$")],
        Annotated[int, Field(ge=0, le=MAX_ATTEMPT)],
    ]
)


def _items(
    session: Session, wanted: AccountingFilter, position: _AfterRow, limit: int
) -> list[views.AccountingRow]:
    """Return up to `limit` + 1 items."""
    period, after = position.period, (position.job_id, position.attempt)
    find = repository.of_jobs if wanted.per == "job" else repository.page
    rows = find(session, wanted, period, after=after, limit=limit + 1)
    node_ids = {node_id for row in rows for node_id in row.held or ()}
    hosts = cluster_repository.hostnames(session, sorted(node_ids))
    items = [_item(row, period, hosts) for row in rows]
    if wanted.per == "attempt":
        return items
    return [reduce(_sum, of_job) for _, of_job in groupby(items, lambda item: item.job_id)]


def _item(row: Row[Any], period: Period, hosts: Mapping[str, str]) -> views.AccountingRow:
    request = resizing.held_request(row.slices, row.bundle, row.roles)
    share = elapsed_s = 0.0
    if row.started_at is not None and row.held_until is not None:
        held = SlotHistory(row.started_at, row.held_until, row.sizes)
        share = held.share(period.since, period.until)
        elapsed_s = held.elapsed_s(period.since, period.until)
    slot_seconds = share * sum(each["slot_seconds"] for each in (row.held or {}).values())
    eligible_at = row.eligible_at
    return views.AccountingRow(
        job_id=row.job_id,
        attempt=row.attempt,
        num_attempts=1,
        name=row.name,
        owner=row.owner,
        queue=row.queue,
        project=row.project,
        labels=row.labels or {},
        array_id=row.array_id,
        array_index=row.array_index,
        state=row.state,
        is_deleted=bool(row.is_deleted),
        reason=row.reason_code,
        exit_code=row.exit_code,
        submitted_at=row.submitted_at,
        eligible_at=eligible_at,
        began_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        waited_s=None if eligible_at is None else (row.created_at - eligible_at).total_seconds(),
        elapsed_s=elapsed_s,
        num_workers=row.world_size,
        resources=without_labels(amounts_of(request)),
        slot_seconds=slot_seconds,
        cpu_seconds=request.mean_bundle.get("CPU", 0.0) * slot_seconds,
        gpu_seconds=request.mean_bundle.get("GPU", 0.0) * slot_seconds,
        max_runtime_s=row.max_runtime_s,
        schedule_id=row.schedule_id,
        reservation=row.reservation,
        nodes=list(dict.fromkeys(hosts.get(each, each) for each in row.held or ())),
        cost=_cost(row, period),
    )


def _cost(row: Row[Any], period: Period) -> views.Cost | None:
    if row.currency is None:
        return None
    history = SlotHistory(row.cost_since, row.cost_until, row.cost_sizes)
    share = history.share(period.since, period.until)
    total, useful, unreported = (share * each for each in (row.total, row.useful, row.unreported))
    wasted = max(0.0, total - useful - unreported)
    return views.Cost(
        currency=row.currency, total=total, useful=useful, wasted=wasted, unreported=unreported
    )


def _sum(one: views.AccountingRow, later: views.AccountingRow) -> views.AccountingRow:
    """Return the sum of the row of a job's attempts so far and the row of its next attempt."""
    waits = [each.waited_s for each in (one, later) if each.waited_s is not None]
    return later.model_copy(
        update={
            "num_attempts": one.num_attempts + later.num_attempts,
            "eligible_at": one.eligible_at,
            "began_at": one.began_at,
            "started_at": one.started_at or later.started_at,
            "waited_s": sum(waits) if waits else None,
            "nodes": list(dict.fromkeys((*one.nodes, *later.nodes))),
            "cost": _total(one.cost, later.cost),
            **{name: getattr(one, name) + getattr(later, name) for name in SUMS},
        }
    )


SUMS = ("elapsed_s", "slot_seconds", "cpu_seconds", "gpu_seconds")


def _total(one: views.Cost | None, later: views.Cost | None) -> views.Cost | None:
    if one is None or later is None or one.currency != later.currency:
        return later or one
    amounts = ("total", "useful", "wasted", "unreported")
    added = {name: getattr(one, name) + getattr(later, name) for name in amounts}
    return later.model_copy(update=added)
