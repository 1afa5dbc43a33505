"""Adds this process's measurements to the database, and reads the state for monitoring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.repositories import webhooks as webhooks_repository
from service.db.repositories.telemetry import service_metrics as repository
from service.db.session import Database, touch
from service.domain.meter import Cell
from service.loops.shared.timings import LoopTimings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watched:
    """The state of the entire service at one point in time."""

    now: datetime
    cells: Mapping[Cell, float]
    """The totals over all processes."""
    queues: Sequence[Row[str, JobState, int, datetime]]
    """The result of `repositories.service_metrics.queues`."""
    webhooks: tuple[int, int, int, int, datetime | None]
    """The result of `repositories.webhooks.summary`."""


class Metering:
    """Runs in every process, including processes that don't run the loops."""

    def __init__(self, database: Database, timings: LoopTimings) -> None:
        self._database = database
        self._timings = timings

    async def run(self) -> None:
        """Run until cancelled. The caller then stores the remaining measurements with `flush`."""
        while True:
            await asyncio.sleep(self._timings.metering_period_s)
            await self.flush()

    async def flush(self) -> None:
        """Add this process's measurements to the totals of all processes. If the database fails,
        the measurements are kept for the next call."""
        cells = self._database.meter.take()
        if not cells:
            return

        def work(session: Session) -> None:
            touch(session)
            repository.add(session, cells)

        try:
            await self._database.write(work)
        except Exception as error:
            self._database.meter.add_all(cells)
            logger.warning("the measurements can't be stored yet: %s", error)

    async def watched(self) -> Watched:
        await self.flush()
        return await self._database.read(self._look)

    def _look(self, session: Session) -> Watched:
        return Watched(
            self._database.time(session),
            repository.every(session),
            repository.queues(session),
            webhooks_repository.summary(session),
        )
