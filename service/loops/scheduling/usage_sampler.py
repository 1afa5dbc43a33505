"""Records the capacity of the cluster and the reasons of waiting jobs, for reports of the usage
over time."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.db.repositories.scheduling import usage as repository
from service.db.session import touch
from service.domain.costs.usage import QUARTER_S
from service.domain.scheduling import policy
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.term import LoopContext

logger = logging.getLogger(__name__)

SAMPLE_PERIOD = timedelta(seconds=5)
"""Minimum time between two samples, because counting 10,000 waiting jobs takes milliseconds."""
MAX_SAMPLE = timedelta(seconds=30)
"""If the next sample is later than this, the time between the samples is not recorded."""
STORE_PERIOD = timedelta(seconds=60)


class UsageSampler(Stage):
    """Takes a sample of every few rounds, and stores sums over a minute. The sums that are not yet
    stored when the service stops are lost."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._sampled_at: datetime | None = None
        self._stored_at: datetime | None = None
        self._total: tuple[float, float] = (0.0, 0.0)
        """The CPUs and GPUs in the latest sample."""
        self._waiting: Counter[tuple[str, str]] = Counter()
        """Number of waiting jobs in the latest sample, keyed by (queue, code)."""
        self._capacity: dict[int, Counter[str]] = {}
        self._waits: defaultdict[tuple[int, str, str], float] = defaultdict(float)

    async def after(self, seen: SchedulerRound) -> None:
        since, now = self._sampled_at, seen.now
        if since is not None and timedelta(0) <= now - since < SAMPLE_PERIOD:
            return
        if since is not None and timedelta(0) < now - since <= MAX_SAMPLE:
            self._add(since, now)
        self._sampled_at = now
        self._total = (seen.total.get("CPU", 0.0), seen.total.get("GPU", 0.0))
        self._waiting = waiting_by_reason(seen)
        if self._stored_at is None or abs(now - self._stored_at) >= STORE_PERIOD:
            self._stored_at = now
            await self._store()

    def _add(self, since: datetime, until: datetime) -> None:
        """Add the state of the latest sample for the time until the current sample."""
        cpus, gpus = self._total
        for quarter, seconds in _quarters(since.timestamp(), until.timestamp()):
            capacity = {
                "measured_s": seconds,
                "cpu_seconds": cpus * seconds,
                "gpu_seconds": gpus * seconds,
            }
            self._capacity.setdefault(quarter, Counter()).update(capacity)
            for (queue, code), number in self._waiting.items():
                self._waits[quarter, queue, code] += number * seconds

    async def _store(self) -> None:
        capacity, waits = self._capacity, self._waits
        if not capacity:
            return

        def work(session: Session, _now: datetime) -> None:
            touch(session)
            repository.add_capacity(session, capacity)
            repository.add_waits(session, waits)

        try:
            await self._database.write(work)
        except Exception as error:
            logger.warning("the capacity and the waiting jobs can't be stored yet: %s", error)
            return
        self._capacity, self._waits = {}, defaultdict(float)


def waiting_by_reason(seen: SchedulerRound) -> Counter[tuple[str, str]]:
    """Return the number of waiting jobs, keyed by (queue, code of the reason)."""
    queues = {job.job_id: job.queue for job in seen.snapshot.queue}
    return Counter(
        (queues[decision.job_id], str(decision.reason.code))
        for decision in seen.decisions
        if isinstance(decision, policy.Wait) and decision.job_id in queues
    )


def _quarters(since: float, until: float) -> Iterator[tuple[int, float]]:
    """Yield (quarter, seconds) of each quarter in the time between two Unix times."""
    while since < until:
        quarter = int(since // QUARTER_S)
        end = min(until, (quarter + 1) * QUARTER_S)
        yield quarter, end - since
        since = end
