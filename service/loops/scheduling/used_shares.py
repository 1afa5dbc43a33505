"""The usage of queues and their users: shares of the cluster, and budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from service.costs.prices_file import PricesFile
from service.costs.spending import UsedUpBudgets
from service.db.repositories import attempts as repository
from service.db.repositories.scheduling import queues as queues_repository
from service.domain.scheduling.placement.slots import Request, count, share_of
from service.domain.scheduling.rules.shares import REMEMBERED_S, Account, Used
from service.lifecycle import resizing
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.queue_view import LiveAttempt

MAX_READ = 100_000


class QueuesAndBudgets(Stage):
    """Adds the queues to the snapshot, and marks queues whose budget is used up."""

    def __init__(self, prices: PricesFile) -> None:
        self._budgets = UsedUpBudgets(prices)

    def look(self, session: Session, seen: SchedulerRound) -> None:
        queues = queues_repository.every(session)
        running = [each.running for each in seen.live if each.running is not None]
        used_up = self._budgets.get(session, queues, seen.now, running)
        seen.snapshot = replace(seen.snapshot, queues=queues, used_up=used_up)


class UsedShares(Stage):
    """Adds the used shares to the snapshot. Each attempt is read only once, after it has ended.

    An attempt's use is counted from the time of its claim, based on the slots that it held at its
    end. Each instance must be used in a single event loop.
    """

    def __init__(self) -> None:
        self._used = Used()
        self._has_looked_back = False
        self._lived: set[tuple[str, int]] = set()
        """Attempts whose end has not been read yet."""

    def claimed(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Record attempts that have begun, because they might end before `look` sees them alive."""
        self._lived.update(attempts)

    def look(self, session: Session, seen: SchedulerRound) -> None:
        if seen.total:
            used_s = self.get(session, seen.now, seen.live, seen.total)
            seen.snapshot = replace(seen.snapshot, used_s=used_s)

    def get(
        self,
        session: Session,
        now: datetime,
        live: Sequence[LiveAttempt],
        total: Mapping[str, float],
    ) -> dict[Account, float]:
        """Return the cluster-seconds used by each account. `total` contains the cluster's current
        resources."""
        lives = {(attempt.job_id, attempt.attempt) for attempt in live}
        if self._has_looked_back:
            gone = [*repository.ended_slots_of(session, self._lived - lives)]
        else:
            since = now - timedelta(seconds=REMEMBERED_S)
            gone = [*repository.ended_slots(session, since=since, limit=MAX_READ)]
            self._has_looked_back = True
        for row in gone:
            self._add(row, total)
        self._lived = lives
        used = self._used.seconds(now.timestamp())
        for attempt in live:
            account = attempt.queue, attempt.owner
            held = Request(count(attempt.slices), attempt.bundle, roles=attempt.roles)
            held_s = share_of(held, total) * attempt.age_s
            used[account] = used.get(account, 0.0) + held_s
        return used

    def _add(self, row: Row[Any], total: Mapping[str, float]) -> None:
        share = share_of(resizing.held_request(row.slices, row.bundle, row.roles), total)
        held_s = max(0.0, (row.finished_at - row.created_at).total_seconds())  # clocks can jump
        self._used.add((row.queue, row.owner), share * held_s, row.finished_at.timestamp())
