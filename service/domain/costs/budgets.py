"""Budgets of queues: limits on what their jobs cost per month and in total."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from dray.input.units import money
from service.domain.scheduling.rules.queues import Queue


@dataclass(frozen=True)
class QueueSpending:
    """The cost of a queue's jobs up to their latest reports."""

    in_all: float = 0.0
    this_month: float = 0.0


def month_of(now: datetime) -> datetime:
    """Return the beginning of the month of `now`, in UTC."""
    return now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def next_month(now: datetime) -> datetime:
    """Return the beginning of the month after `now`, in UTC."""
    month = month_of(now)
    if month.month == 12:
        return month.replace(year=month.year + 1, month=1)
    return month.replace(month=month.month + 1)


def with_budget(queues: Iterable[Queue]) -> list[Queue]:
    return [queue for queue in queues if (queue.budget, queue.monthly_budget) != (None, None)]


def used_up(queue: Queue, spending: QueueSpending, currency: str, now: datetime) -> str | None:
    """Return the reason why no job of the queue can start: the budget, the spending, and when jobs
    can start again. None if no budget is exhausted."""
    what = f"the queue {queue.name!r} has exhausted its budget"
    raised = f"`dray queue set {queue.name}"
    if queue.budget is not None and spending.in_all >= queue.budget:
        return (
            f"{what} of {money(queue.budget, currency)}: its jobs have cost "
            f"{rounded(spending.in_all, currency)}. Jobs can start again when an admin increases "
            f"the budget ({raised} --budget ...`)"
        )
    most = queue.monthly_budget
    if most is not None and spending.this_month >= most:
        return (
            f"{what} of {money(most, currency)} for {now.astimezone(UTC):%B %Y}: its jobs have "
            f"cost {rounded(spending.this_month, currency)}. Jobs can start again on "
            f"{next_month(now):%Y-%m-%d} at 00:00 UTC, or when an admin increases the budget "
            f"({raised} --monthly-budget ...`)"
        )
    return None


def rounded(amount: float, currency: str) -> str:
    """Return the amount with three significant digits, so that the message doesn't change with
    every report."""
    return money(float(f"{amount:.3g}"), currency)
