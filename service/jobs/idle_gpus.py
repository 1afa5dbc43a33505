"""GPUs that running jobs hold, but do not use, according to their system metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from service.db.repositories.scheduling import usage as usage_repository
from service.db.repositories.telemetry import system_metrics as repository
from service.db.session import Database
from service.domain.costs.usage import IDLE_BELOW
from service.domain.scheduling.placement.slots import amounts_of
from service.domain.series import Series
from service.domain.system_metrics import SystemSamples, joined, unpack
from service.lifecycle import resizing
from service.lifecycle.usage import is_gpu_use

MAX_IDLE_S = 24 * 3600
"""Samples of this time are read."""
RECENT_S = 300
"""A job whose newest sample of a GPU is older than this is not measured."""


class IdleGpuSearch:
    """Searches the samples of running jobs for idle GPUs."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock or database.clock

    async def report(self, min_idle_s: float) -> views.IdleGpuReport:
        """Return the running jobs with GPUs that have been idle for `min_idle_s` seconds."""
        now = int(self._clock().timestamp())

        def work(session: Session) -> views.IdleGpuReport:
            items, unmeasured = [], []
            for row in usage_repository.live(session):
                num_gpus = amounts_of(resizing.held_request(row.slices, row.bundle, row.roles)).get(
                    "GPU", 0.0
                )
                if not num_gpus:
                    continue
                who = {name: getattr(row, name) for name in ("job_id", "name", "owner", "queue")}
                newest = [unpack(row) for row in repository.newest_points(session, row.job_id)]
                idle = _idle_since(newest)
                if not idle or max(each.times[-1] for each in newest) < now - RECENT_S:
                    unmeasured.append(views.UnmeasuredGpus(**who, num_gpus=num_gpus))
                elif any(since is not None for since in idle.values()):
                    item = _item(session, row, now, min_idle_s, len(idle), who)
                    items += [] if item is None else [item]
            items.sort(key=lambda item: (-item.num_idle, item.idle_since, item.job_id))
            return views.IdleGpuReport(min_idle_s=min_idle_s, items=items, unmeasured=unmeasured)

        return await self._database.read(work)


def _item(
    session: Session,
    row: Row[Any],
    now: int,
    min_idle_s: float,
    num_measured: int,
    who: Mapping[str, str],
) -> views.IdleGpus | None:
    begin = max(now - MAX_IDLE_S, int(row.started_at.timestamp()))
    groups: dict[int, list[SystemSamples]] = defaultdict(list)
    for first_rank, points in repository.all_points_after(session, row.job_id, begin):
        groups[first_rank].append(unpack(points))
    found = _idle_since([joined(group) for group in groups.values()])
    longest = now - min_idle_s
    idle = {gpu: since for gpu, since in found.items() if since is not None and since <= longest}
    if not idle:
        return None
    return views.IdleGpus(
        **who,
        ranks=sorted({rank for _, rank in idle}),
        num_idle=len(idle),
        num_measured=num_measured,
        idle_since=datetime.fromtimestamp(max(idle.values()), UTC),
    )


def _idle_since(groups: Sequence[SystemSamples]) -> dict[Series, int | None]:
    """For each GPU, return the time of the first of the consecutive samples in which it was idle,
    up to its newest sample; None if its newest sample shows that it was used.

    groups: the samples of different ranks.
    """
    found: dict[Series, int | None] = {}
    for samples in groups:
        for series, uses in samples.columns.items():
            if not is_gpu_use(series[0]):
                continue
            for time, use in zip(reversed(samples.times), reversed(uses), strict=True):
                if use >= IDLE_BELOW:
                    found.setdefault(series, None)
                    break
                if use == use:
                    found[series] = time
    return found
