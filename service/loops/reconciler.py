"""The reconciler: a loop that finds out what became of each live attempt, and stores it.

Each live attempt has a follower, a task that long-polls it and stores every reply together with
the cursor in one transaction. So a reply that was not stored is simply asked for again, by this
process or by the next one. What is live is what SQL says, not what this process remembers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from ray_workers.shared.contracts import Cause, PollReply
from service.cluster.port import AttemptRef, Cluster, ClusterUnavailable
from service.config.settings import Settings
from service.db.notifications import QUEUE, Signals
from service.db.repositories import jobs as repository
from service.ingest import attempt_results
from service.loops import queue_view
from service.loops.commands import Command, Commands
from service.loops.fencing import LoopDatabase
from service.loops.scheduler import Scheduler
from service.storage.storage import Storage

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20
MIN_PERIOD_S = 0.2
"""Between two replies with data, so that a fast job's steps are stored in batches."""
UNAVAILABLE_PAUSE_S = 0.5
ORPHANS_PERIOD_S = 30.0
DELETED_PERIOD_S = 15.0
LAUNCH_GRACE_S = 40.0
"""How long after its claim an attempt may still be launched by another process: longer than the
gateway waits for an answer."""


class Reconciler:
    """Owns one follower task for each live attempt."""

    def __init__(
        self,
        database: LoopDatabase,
        cluster: Cluster,
        storage: Storage,
        scheduler: Scheduler,
        signals: Signals,
        settings: Settings,
    ) -> None:
        self._database = database
        self._cluster = cluster
        self._storage = storage
        self._scheduler = scheduler
        self._signals = signals
        self._settings = settings
        self._followers: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._refs: dict[tuple[str, int], AttemptRef] = {}
        """Of what is followed: a group that grows comes to other nodes."""
        self._chores: dict[tuple[object, ...], asyncio.Task[None]] = {}
        self._errands = Commands(cluster)
        self._orphans_at = self._deleted_at = 0.0

    async def run(self) -> None:
        """Until cancelled; the followers end with it."""
        try:
            with self._signals.subscribe(QUEUE) as woken:
                while True:
                    try:
                        await self.run_once()
                    except Exception:
                        logger.exception("the reconciler failed a round; it goes on")
                    await woken.wait(self._settings.scheduler_tick_s)
        finally:
            running = [*self._followers.values(), *self._chores.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def run_once(self) -> None:
        """Start the followers that are missing, pass on what users asked, end what nobody owns."""
        _, live = await self._database.read(queue_view.snapshot)
        for attempt in live:
            key = (attempt.job_id, attempt.attempt)
            if key in self._scheduler.launching:
                continue
            self._refs[key] = _ref(attempt)
            if key not in self._followers:
                task = asyncio.create_task(self._follow(attempt), name=f"follow {key}")
                self._followers[key] = task
                task.add_done_callback(functools.partial(self._forget, key))
            for errand in self._errands.due(attempt, self._refs[key]):
                self._begin(errand.key, self._run(errand))
        if asyncio.get_running_loop().time() >= self._orphans_at:
            self._begin(("orphans",), self._end_orphans())
        if asyncio.get_running_loop().time() >= self._deleted_at:
            self._begin(("deleted",), self._drop_deleted())

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._followers.pop(key, None)
        self._refs.pop(key, None)

    def _begin(self, what: tuple[object, ...], chore: Coroutine[Any, Any, None]) -> None:
        """Do it beside the loop, once at a time: one supervisor that does not answer must not
        keep the others waiting."""
        if what in self._chores:
            return chore.close()
        self._chores[what] = task = asyncio.create_task(chore)
        task.add_done_callback(lambda _: self._chores.pop(what, None))
        return None

    async def _run(self, errand: Command) -> None:
        try:
            await errand.call()
        except ClusterUnavailable as error:
            logger.info("can't tell %s attempt %d to %s yet: %s", *errand.key, error)
            await asyncio.sleep(UNAVAILABLE_PAUSE_S)
        else:
            self._errands.done(errand)

    async def _follow(self, attempt: queue_view.LiveAttempt) -> None:
        """Poll one attempt and store what it says, until its outcome is stored."""
        key, cursor, said = (attempt.job_id, attempt.attempt), dict(attempt.cursor), ""
        loop = asyncio.get_running_loop()
        claimed_at = loop.time() - attempt.age_s
        given_up = False
        while True:
            asked_at, ref = loop.time(), self._refs[key]
            try:
                reply = await self._cluster.poll(
                    ref, cursor, self._settings.poll_wait_s, MAX_REPLY_BYTES
                )
                if reply.outcome is not None and ref != self._refs[key]:
                    continue  # it came to other nodes meanwhile, which were not looked at
                if not given_up and _was_never_there(reply):
                    given_up = await self._give_up(ref, asked_at - claimed_at)
                    continue  # it may have come while it was given up
            except ClusterUnavailable as error:
                if str(error) != said:
                    said = str(error)
                    logger.info("no answer from %s attempt %d: %s", ref.job_id, ref.attempt, said)
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)
                continue
            try:
                recorded = await self._store(ref, cursor, reply)
            except Exception:
                logger.exception("could not store a reply of %s; asking again", ref.job_id)
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)
                continue
            if not recorded.live:  # its end is stored, by us or by someone else
                return await self._close(ref)
            cursor = dict(recorded.cursor)
            if not reply.more:
                await asyncio.sleep(max(0.0, MIN_PERIOD_S - (loop.time() - asked_at)))

    async def _give_up(self, ref: AttemptRef, age_s: float) -> bool:
        """See to it that an attempt without a supervisor does not come late; False, after a
        pause, while it may be one that is just being launched.

        Of our own launches we know when they are over; others may be under way in another
        process, or in a gateway that outlives the service that was killed.
        """
        ours = (ref.job_id, ref.attempt) in self._scheduler.claimed
        if not ours and age_s < LAUNCH_GRACE_S:
            await asyncio.sleep(UNAVAILABLE_PAUSE_S)
            return False
        await self._cluster.give_up(ref)
        return True

    async def _store(
        self, ref: AttemptRef, asked: Mapping[str, int], reply: PollReply
    ) -> attempt_results.Recorded:
        return await self._database.write(
            lambda session, now: attempt_results.record(
                session,
                self._storage,
                ref.job_id,
                ref.attempt,
                reply,
                now,
                asked=asked,
            )
        )

    async def _close(self, ref: AttemptRef) -> None:
        """Let the cluster forget an attempt whose end is stored; repeated as an orphan's."""
        self._errands.forget(ref.job_id, ref.attempt)
        self._scheduler.claimed.discard((ref.job_id, ref.attempt))
        try:
            await self._cluster.acknowledge(ref)
        except ClusterUnavailable as error:
            logger.info("%s attempt %d is not yet acknowledged: %s", ref.job_id, ref.attempt, error)
            self._orphans_at = 0.0
        self._signals.publish(QUEUE)

    async def _end_orphans(self) -> None:
        """End attempts that the cluster still has and SQL has closed.

        SQL is asked last: an attempt is claimed before it is launched, so that what the cluster
        lists and SQL then does not call live has ended.
        """
        self._orphans_at = asyncio.get_running_loop().time() + ORPHANS_PERIOD_S
        try:
            known = await self._cluster.attempts()
            _, live = await self._database.read(queue_view.snapshot)
            owned = {(a.job_id, a.attempt) for a in live} | set(self._followers)
            for ref in known:
                key = (ref.job_id, ref.attempt)
                if key not in owned:
                    logger.warning("ending %s attempt %d, which nobody owns", *key)
                    with contextlib.suppress(ClusterUnavailable):  # it may be stopped
                        await self._cluster.stop_attempt(ref)
                    await self._cluster.acknowledge(ref)
        except ClusterUnavailable:
            await asyncio.sleep(UNAVAILABLE_PAUSE_S)
            self._orphans_at = 0.0

    async def _drop_deleted(self) -> None:
        """Have the nodes delete what they keep for jobs that were deleted.

        It goes by what the nodes say, so that one that was away is told later. SQL is asked last: a
        job is stored before a node hears of it.
        """
        self._deleted_at = asyncio.get_running_loop().time() + DELETED_PERIOD_S
        try:
            kept = await self._cluster.kept_jobs()
            known = await self._database.read(lambda s, _: repository.existing(s, kept))
            if deleted := sorted(set(kept) - known):
                logger.info("the nodes drop what they keep for deleted jobs: %s", deleted)
                await self._cluster.drop_jobs(deleted)
        except ClusterUnavailable:
            await asyncio.sleep(UNAVAILABLE_PAUSE_S)
            self._deleted_at = 0.0


def _was_never_there(reply: PollReply) -> bool:
    """Whether there is no supervisor, and never was anything of the attempt as far as we know."""
    lost = reply.outcome is not None and reply.outcome.cause is Cause.SUPERVISOR_LOST
    return lost and not reply.cursor


def _ref(attempt: queue_view.LiveAttempt) -> AttemptRef:
    return AttemptRef(
        job_id=attempt.job_id,
        attempt=attempt.attempt,
        session=attempt.cluster_session,
        node_ids=attempt.node_ids,
    )
