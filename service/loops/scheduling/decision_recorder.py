"""The decision recorder: a loop that stores the inputs and decisions of the scheduler's rounds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from service.domain.errors import DatabaseUnavailable
from service.domain.scheduling import policy
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.shared.batches import together_or_alone
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.outlook import decisions
from service.outlook.decisions import Record, SeenRound

logger = logging.getLogger(__name__)

MOST_WAITING = 32
"""Maximum number of rounds that wait to be stored. If this number is exceeded, the oldest rounds
are dropped, so that the scheduler never has to wait."""
MOST_JOBS = 20_000
"""Maximum total number of waiting jobs in these rounds."""
FORGET_S = 60.0
"""Seconds between two deletions of rounds that are too old or exceed the maximum number."""


class DecisionRecorder(Stage):
    """Stores the rounds that the scheduler passes to it."""

    def __init__(self, database: LoopDatabase, timings: LoopTimings) -> None:
        self._database = database
        self._timings = timings
        self._rounds: deque[SeenRound] = deque(maxlen=MOST_WAITING)
        self._woken = asyncio.Event()
        self._forget_at = 0.0

    async def after(self, seen: SchedulerRound) -> None:
        if any(not isinstance(each, policy.Wait | policy.Stay) for each in seen.decisions):
            self.note(SeenRound(seen.asked or seen.snapshot, tuple(seen.planned), seen.now))

    def note(self, seen: SeenRound) -> None:
        """Queue a round for storing, if it changed anything."""
        if seen.changes:
            self._rounds.append(seen)
            while len(self._rounds) > 1 and self._num_jobs() > MOST_JOBS:
                self._rounds.popleft()
            self._woken.set()

    def _num_jobs(self) -> int:
        return sum(len(seen.snapshot.queue) for seen in self._rounds)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._woken.wait()
            try:
                await self.run_once()
            except Exception:
                logger.exception("a scheduling round could not be stored; the loop continues")

    async def run_once(self) -> int:
        """Store the waiting rounds. Returns their number."""
        self._woken.clear()
        rounds = [self._rounds.popleft() for _ in range(len(self._rounds))]
        try:
            if rounds:
                await self._keep(rounds)
        except DatabaseUnavailable:
            newer = list(self._rounds)
            self._rounds.clear()
            # Keep the rounds that could not be stored, and store them with the next round.
            self._rounds.extend([*rounds, *newer])
            raise
        loop = asyncio.get_running_loop()
        if loop.time() >= self._forget_at:
            self._forget_at = loop.time() + FORGET_S
            await self._database.write(decisions.forget)
        return len(rounds)

    async def _keep(self, rounds: Sequence[SeenRound]) -> None:
        records, took_s = await asyncio.to_thread(_timed, rounds)
        for answer in await together_or_alone(records, self._store):
            if isinstance(answer, Exception):
                logger.error("a scheduling round could not be stored", exc_info=answer)
        rest_s = self._timings.record_rest * took_s
        await asyncio.sleep(max(rest_s, self._timings.record_period_s))

    async def _store(self, records: Sequence[Record]) -> Sequence[None]:
        await self._database.write(lambda s, _: decisions.store(s, records))
        return [None] * len(records)


def _timed(rounds: Sequence[SeenRound]) -> tuple[list[Record], float]:
    """Return the records, and the CPU seconds that creating them took."""
    began, records = time.thread_time(), []
    for seen in rounds:
        try:
            records.append(decisions.record(seen))
        except Exception:
            logger.exception("a scheduling round could not be stored")
    return records, time.thread_time() - began
