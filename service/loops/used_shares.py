"""How much of the cluster each user of each queue has used of late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from ray_workers.shared.contracts import Slice
from service.db.repositories import attempts as repository
from service.domain.scheduling import order, policy
from service.domain.scheduling.shares import REMEMBERED_S, Account, Used
from service.lifecycle import resizing
from service.loops.queue_view import LiveAttempt

FRESH_FOR = timedelta(seconds=30)
"""How old the answer may be on attempts that were not seen alive."""
LATE = timedelta(hours=1)
"""By which the end of an attempt may be stored late."""
MAX_READ = 100_000


class UsedShares:
    """Read now and then; belongs to one loop.

    An attempt counts with the slots that it held at its end, from its claim on.
    """

    def __init__(self) -> None:
        self._used = Used()
        self._read_at: datetime | None = None
        self._known: dict[tuple[str, int], datetime] = {}
        """Ends of the attempts that a later look may find again."""
        self._lived: set[tuple[str, int]] = set()
        """Attempts that lived when it was asked last."""

    def get(
        self,
        session: Session,
        now: datetime,
        live: Sequence[LiveAttempt],
        total: Mapping[str, float],
    ) -> dict[Account, float]:
        """Cluster-seconds; total: resources of the cluster as it is now."""
        lives = {(attempt.job_id, attempt.attempt) for attempt in live}
        has_ended = bool(self._lived - lives)
        if self._read_at is None or has_ended or not now - self._read_at < FRESH_FOR:
            self._read(session, now, total)
        self._lived = lives
        used = self._used.seconds(now.timestamp())
        for attempt in live:
            account = attempt.queue, attempt.owner
            held_s = _share(attempt.slices, attempt.bundle, total) * attempt.age_s
            used[account] = used.get(account, 0.0) + held_s
        return used

    def _read(self, session: Session, now: datetime, total: Mapping[str, float]) -> None:
        began = now - timedelta(seconds=REMEMBERED_S)
        since = began if self._read_at is None else self._read_at - LATE
        self._known = {key: end for key, end in self._known.items() if end > since}
        for row in repository.ended_slots(session, since=since, limit=MAX_READ):
            key = (row.job_id, row.attempt)
            if key in self._known:
                continue
            self._known[key] = row.finished_at
            share = _share(resizing.as_slices(row.slices), row.bundle, total)
            held_s = (row.finished_at - row.created_at).total_seconds()
            at = row.finished_at.timestamp()
            self._used.add((row.queue, row.owner), share * held_s, at)
        self._read_at = now


def _share(
    slices: Sequence[Slice], bundle: Mapping[str, float], total: Mapping[str, float]
) -> float:
    num_workers = sum(part.num_workers for part in slices)
    return order.share_of(policy.Request(num_workers, bundle), total)
