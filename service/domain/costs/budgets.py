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
    to_come: float = 0.0
    """The further cost that the running jobs are expected to have."""
    to_come_this_month: float = 0.0


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
    most = queue.budget
    if most is not None and spending.in_all + spending.to_come >= most:
        cost, unless = _cost(spending.in_all, spending.to_come, most, currency)
        return (
            f"{what} of {money(most, currency)}: {cost}. Jobs can start again {unless}when an "
            f"admin increases the budget ({raised} --budget ...`)"
        )
    most = queue.monthly_budget
    if most is not None and spending.this_month + spending.to_come_this_month >= most:
        cost, unless = _cost(spending.this_month, spending.to_come_this_month, most, currency)
        return (
            f"{what} of {money(most, currency)} for {now.astimezone(UTC):%B %Y}: {cost}. Jobs can "
            f"start again {unless}on {next_month(now):%Y-%m-%d} at 00:00 UTC, or when an admin "
            f"increases the budget ({raised} --monthly-budget ...`)"
        )
    return None


def _cost(spent: float, to_come: float, most: float, currency: str) -> tuple[str, str]:
    """Return a clause about the cost, and a clause about what else could allow jobs to start."""
    if spent >= most:
        return f"its jobs have cost {rounded(spent, currency)}", ""
    # Both amounts change while the jobs run, and each change of the sentence is stored.
    more = rounded(to_come, currency, digits=1)
    cost = (
        f"its jobs have cost about {rounded(spent, currency, digits=1)}, and the running jobs are "
        f"expected to cost about {more} more"
    )
    return cost, "if these jobs cost less, or "


def rounded(amount: float, currency: str, digits: int = 3) -> str:
    """Return the amount with few significant digits, so that the message doesn't change with every
    report."""
    return money(float(f"{amount:.{digits}g}"), currency)
