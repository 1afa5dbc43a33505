"""The forecaster: a loop that predicts when jobs will start and end, and measures the errors of its
predictions.

The loop simulates the policy, starting from the scheduler's last round. Simulating a long queue
takes seconds, so the simulation runs step by step, with pauses in which the other loops can run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

from sqlalchemy.orm import Session

from service.db.notifications import QUEUE, Signals
from service.db.repositories.scheduling import forecasts as repository
from service.db.session import touch
from service.domain.scheduling.outlook import ranges
from service.domain.scheduling.outlook.simulation import Expected
from service.domain.scheduling.outlook.situation import Situation
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.outlook import codec, forecasts
from service.outlook.forecasts import Key
from service.outlook.step_times import EarlierRuns

logger = logging.getLogger(__name__)


class Forecaster(Stage):
    """Makes forecasts from the rounds that the scheduler passes to it."""

    def __init__(self, database: LoopDatabase, signals: Signals, timings: LoopTimings) -> None:
        self._database = database
        self._latest: SchedulerRound | None = None
        """The latest round, before other stages changed it."""
        self._signals = signals
        self._timings = timings
        self._forecasts = forecasts.Forecasts()
        self._earlier = EarlierRuns()

    def look(self, session: Session, seen: SchedulerRound) -> None:
        self._latest = replace(seen)  # a copy, because stages change the round's snapshot

    async def run(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        with self._signals.subscribe(QUEUE) as woken:
            while True:
                began = loop.time()
                try:
                    await self.run_once()
                except Exception:
                    logger.exception("a round of the forecaster failed; the loop continues")
                    # Read the forecast again, because it might have been stored even though the
                    # response was lost.
                    self._forecasts = forecasts.Forecasts()
                took_s = loop.time() - began
                await asyncio.sleep(max(took_s, self._timings.forecast_pause_s))
                await woken.wait(self._timings.forecast_period_s)

    async def run_once(self) -> int:
        """Make one forecast. Returns the number of starts and ends that it changed."""
        view = self._latest
        if view is None:
            return 0
        known = await self._database.read(self._read)
        situation = await asyncio.to_thread(_situation, view, known)
        # Store the situation before the simulation, because requests read the situation while the
        # simulation runs.
        stored = await asyncio.to_thread(lambda: codec.encode(situation.first_jobs()))
        await self._database.write(lambda s, _: _put(s, view.now, stored))
        plays = await asyncio.to_thread(ranges.plays, situation, view.now)
        for play in plays:
            while await self._restful(play.step):
                pass
        starts, ends = ranges.expected(situation, plays), forecasts.ends(known, view.now)
        pieces = await asyncio.to_thread(self._forecasts.changes, known, starts, ends, view.now)
        for changes in pieces:
            await self._store(changes, view.now)
        await self._database.write(_settle)
        return sum(map(len, pieces))

    async def _store(self, changes: Mapping[Key, Expected], made_at: datetime) -> None:
        await self._database.write(lambda s, _: self._forecasts.store(s, changes, made_at))
        self._forecasts.stored(changes)

    async def _restful(self, step: Callable[[], bool]) -> bool:
        """Run one step in a thread, and then pause. Returns whether there are more steps."""
        goes_on, took_s = await asyncio.to_thread(_timed, step)
        await asyncio.sleep(self._timings.forecast_rest * took_s)
        return goes_on

    def _read(self, session: Session, now: datetime) -> forecasts.Facts:
        self._forecasts.load(session)
        return forecasts.facts(session, self._earlier.get(session, now))


def _put(session: Session, made_at: datetime, situation: bytes) -> None:
    touch(session)  # no response about a job has changed
    repository.put_situation(session, made_at, situation)


def _settle(session: Session, now: datetime) -> None:
    touch(session)
    repository.settle(session)
    repository.put_errors(session, forecasts.errors(session, now).model_dump(mode="json"))


def _timed(step: Callable[[], bool]) -> tuple[bool, float]:
    began = time.thread_time()
    return step(), time.thread_time() - began


def _situation(view: SchedulerRound, known: forecasts.Facts) -> Situation:
    ran_s = {
        attempt.job_id: (view.now - attempt.started_at).total_seconds()
        for attempt in view.live
        if attempt.started_at is not None
    }
    return forecasts.situation(view.snapshot, known, ran_s, view.now)
