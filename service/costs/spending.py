"""The spending of attempts and queues, and queues whose budget is used up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from ray_workers.shared.slices import by_bundle
from service.costs.prices_file import PricesFile
from service.db.models import AttemptCostRow, AttemptRow, JobRow
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import costs as repository
from service.domain.costs.budgets import QueueSpending, month_of, next_month, used_up, with_budget
from service.domain.costs.prices import Prices, cost_of
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.tree import QueueTree
from service.lifecycle import held_slots, resizing

FRESH_FOR = timedelta(seconds=5)
"""Maximum age of the totals that the scheduler uses. Attempts report every 10 seconds."""


def of_queues(
    session: Session, names: Sequence[str], currency: str, now: datetime
) -> dict[str, QueueSpending]:
    """Return the spending of each queue, up to the latest reports of its jobs."""
    in_all = repository.spent_in_all(session, names, currency)
    month = month_of(now), next_month(now)
    this_month = repository.between(session, "queue", *month, queues=names, currency=currency)
    return {
        name: QueueSpending(
            in_all.get(name, 0.0),
            this_month[name, currency].amounts["total"] if (name, currency) in this_month else 0.0,
        )
        for name in names
    }


def with_those_under(
    session: Session, tree: QueueTree, names: Sequence[str], currency: str, now: datetime
) -> dict[str, QueueSpending]:
    """Return the spending of each queue together with all queues under it."""
    under = {name: tree.under(name) for name in names}
    every = list(dict.fromkeys(each for names in under.values() for each in names))
    spent = of_queues(session, every, currency, now)
    return {
        name: QueueSpending(
            sum(spent[each].in_all for each in names),
            sum(spent[each].this_month for each in names),
        )
        for name, names in under.items()
    }


class UsedUpBudgets:
    """The queues whose budget is used up. The database is read periodically. Not thread-safe."""

    def __init__(self, prices: PricesFile) -> None:
        self._prices = prices
        self._read_at: datetime | None = None
        self._read_for: object = None
        self._sentences: dict[str, str] = {}

    def get(
        self,
        session: Session,
        queues: Sequence[Queue],
        now: datetime,
        running: Sequence[RunningJob] = (),
    ) -> dict[str, str]:
        """Return a reason for each queue in which no job starts because its budget, or the budget
        of a queue above it, is used up, keyed by the queue's name. The expected cost of the running
        jobs counts as spent."""
        limited = with_budget(queues)
        prices = self._prices.current() if limited else None
        if prices is None:
            return {}
        read_for = queues, prices, month_of(now), [(job.job_id, job.slices) for job in running]
        is_fresh = self._read_at is not None and abs(now - self._read_at) < FRESH_FOR
        if not is_fresh or read_for != self._read_for:
            tree, names = QueueTree(queues), [queue.name for queue in limited]
            spending = with_those_under(session, tree, names, prices.currency, now)
            to_come = _to_come(session, running, prices, now)
            self._sentences = {}
            for queue in limited:
                committed = [to_come[name] for name in tree.under(queue.name) if name in to_come]
                spent = replace(
                    spending[queue.name],
                    to_come=sum(each.to_come for each in committed),
                    to_come_this_month=sum(each.to_come_this_month for each in committed),
                )
                why = used_up(queue, spent, prices.currency, now)
                if why is not None:
                    self._sentences |= dict.fromkeys(tree.under(queue.name), why)
            self._read_at, self._read_for = now, read_for
        return self._sentences


def _to_come(
    session: Session, running: Sequence[RunningJob], prices: Prices, now: datetime
) -> dict[str, QueueSpending]:
    """Return the expected additional cost of the running jobs of each queue. A job
    without an estimate is expected to continue for as long as it has already run."""
    node_ids = {part.node_id for job in running for part in job.slices}
    labels = cluster_repository.labels(session, sorted(node_ids)) if node_ids else {}
    month_left_s = (next_month(now) - now).total_seconds()
    found: dict[str, QueueSpending] = {}
    for job in running:
        if job.is_leaving:
            continue
        parts = by_bundle(job.slices, job.request.bundle, job.request.roles)
        per_hour = sum(
            part.num_workers * prices.slot_hour(bundle, labels.get(part.node_id, {}))
            for part, bundle in parts
        )
        estimates = (job.left_s, job.guess_s, job.held_s)
        left_s = next(each for each in estimates if each is not None)
        if job.ends_within_s is not None:
            left_s = min(left_s, job.ends_within_s)
        before = found.get(job.queue, QueueSpending())
        found[job.queue] = QueueSpending(
            to_come=before.to_come + per_hour * left_s / 3600,
            to_come_this_month=before.to_come_this_month
            + per_hour * min(left_s, month_left_s) / 3600,
        )
    return found


def charge(
    session: Session, job: JobRow, attempt: AttemptRow, prices: Prices | None, until: datetime
) -> None:
    """Store the cost of the attempt up to `until`.

    `prices` apply to the attempt's entire time; None if the deployment has no prices. A price
    change therefore also applies to the past running time of live attempts, but not to attempts
    that have ended.
    """
    held_slots.settle(attempt, until)
    if prices is None or attempt.held_until is None or attempt.started_at is None:
        return
    bundle = resizing.held_request(attempt.slices, attempt.bundle, attempt.roles).mean_bundle
    cost = cost_of(prices, bundle, held_slots.of(attempt), attempt.slot_seconds or {})
    repository.put(
        session,
        AttemptCostRow(
            job_id=job.id,
            attempt=attempt.attempt,
            queue=job.queue,
            owner=job.owner,
            since=attempt.started_at,
            until=attempt.held_until,
            sizes=attempt.sizes,
            currency=prices.currency,
            slot_seconds=cost.slot_seconds,
            total=cost.total,
            useful=cost.useful,
            unreported=cost.unreported,
        ),
    )
    repository.set_of_job(session, job, prices.currency)
