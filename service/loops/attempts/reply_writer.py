"""Stores the replies of attempts. Replies that arrive during a transaction are stored together in
the next transaction.

Each report is checked when it is decoded, so only a bug in dray can make a reply impossible to
store. Such a reply would be requested again and again, and its attempt would keep its slots
forever, even after it is cancelled. To prevent this, `ReplyReduction` removes reports from the
reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy.orm import Session

from service.costs.prices_file import PricesFile
from service.db.session import is_of_values
from service.domain import meter
from service.ingest import attempt_results
from service.ingest.attempt_results import Received, Recorded
from service.ingest.supervisor_frames import is_from_supervisor
from service.loops.shared.batches import together_or_alone
from service.loops.shared.fencing import LoopDatabase
from service.storage.staged_files import StagedFiles, with_files
from service.storage.storage import Storage
from service.telemetry.known_attempts import KnownAttempts

MAX_REPLIES, MAX_OF_REPORTING = 200, 50
"""Maximum number of replies in one transaction, and how many of them may come from attempts that
have reported before, whose replies take longer to store. The limits are needed because SQLite has
only one writer, and other writes have to wait."""
MAX_FRAMES = 2000
"""Maximum number of frames in a transaction with several replies. A reply with more frames gets its
own transaction, which runs concurrently with other transactions if the database supports several
writers."""
TRIES = 3
"""Number of failures after which a reply is stored without the ranks' reports. After twice this
number, the reply is stored without any reports."""

_Waiting = tuple[Received, asyncio.Future[Recorded]]


class ReplyWriter:
    """Stores replies in batches. Each instance must be used in a single event loop."""

    def __init__(self, database: LoopDatabase, storage: Storage, prices: PricesFile) -> None:
        self._database = database
        self._storage = storage
        self._prices = prices
        self._known = KnownAttempts()
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, received: Received) -> Recorded:
        """Store the reply, and return its effect."""
        began = asyncio.get_running_loop().time()
        recorded = await self._store(received)
        self._database.meter.add(meter.REPLY_DELAY, asyncio.get_running_loop().time() - began)
        return recorded

    async def _store(self, received: Received) -> Recorded:
        if len(received.reply.frames) > MAX_FRAMES:
            (recorded,) = await self._write([received])
            return recorded
        answer: asyncio.Future[Recorded] = asyncio.get_running_loop().create_future()
        self._waiting.append((received, answer))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all(), name="reply writer")
        return await answer

    async def close(self) -> None:
        """Stop writing. Replies that are still waiting will be requested again later."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_all(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                stored = await together_or_alone([received for received, _ in batch], self._write)
            except Exception as error:
                stored = [error] * len(batch)
            for (_, answer), recorded in zip(batch, stored, strict=True):
                if answer.done():
                    continue  # the attempt's follower was cancelled
                if isinstance(recorded, Exception):
                    answer.set_exception(recorded)
                else:
                    answer.set_result(recorded)

    def _next_batch(self) -> list[_Waiting]:
        """Take the first waiting reply, and the replies of other jobs that fit into the same
        transaction."""
        batch: list[_Waiting] = []
        left: list[_Waiting] = []
        jobs: set[str] = set()
        num_frames = num_reporting = 0
        for each in self._waiting:
            received, _ = each
            num_frames += len(received.reply.frames)
            num_reporting += bool(received.reply.cursor)
            fits = num_reporting <= MAX_OF_REPORTING and num_frames <= MAX_FRAMES
            if fits and len(batch) < MAX_REPLIES and received.job_id not in jobs:
                batch.append(each)
                jobs.add(received.job_id)
            else:
                left.append(each)
        self._waiting = left
        return batch

    async def _write(self, received: Sequence[Received]) -> list[Recorded]:
        async def write(files: StagedFiles) -> list[Recorded]:
            def work(session: Session, now: datetime) -> list[Recorded]:
                recorded = attempt_results.record(
                    *(session, files, received, now),
                    prices=self._prices.current(),
                    known=self._known,
                )
                files.check()
                return recorded

            return await self._database.write(work)

        return await with_files(self._storage, write)


@dataclass
class ReplyReduction:
    """Removes reports from the replies of one attempt if they can't be stored."""

    _failures: int = 0
    _why: str = ""

    def note(self, error: Exception) -> None:
        """Count a failure to store a reply."""
        if is_of_values(error):
            self._failures += 1
            self._why = type(error).__name__

    def reset(self) -> None:
        """Forget the failures, because a reply was stored."""
        self._failures = 0

    def reduce(self, received: Received) -> Received:
        """Return the reply without the reports that might prevent it from being stored."""
        if self._failures < TRIES:
            return received
        frames = received.reply.frames
        keeps_some = self._failures < 2 * TRIES
        kept = tuple(frame for frame in frames if keeps_some and is_from_supervisor(frame))
        number = len(frames) - len(kept) + len(received.in_storage)
        message = (
            f"{number} reports of this attempt are dropped, because they can't be stored "
            f"({self._why}); the service's log has the full error"
        )
        reply = replace(received.reply, frames=kept)
        return replace(received, reply=reply, in_storage=(), left_out=message)
