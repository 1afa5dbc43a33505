"""The reconciler: a loop that polls every live attempt and stores its replies and its outcome.

Each live attempt has a follower, a task that long-polls the attempt and stores every reply,
together with the cursor, in one transaction. A reply that was not stored is therefore requested
again, by this process or by the next leader. The database, not the memory of this process,
determines which attempts are live.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.commands import Command, Stop
from ray_workers.shared.contracts import Cause, Frame, Outcome, Phase, PollReply
from service.checkpoints import catalog
from service.cluster.port import AttemptRef, ClusterUnavailable
from service.db.notifications import ATTEMPTS, QUEUE
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as repository
from service.ingest.attempt_results import Received
from service.loops.attempts.reply_writer import ReplyReduction, ReplyWriter
from service.loops.shared import queue_view
from service.loops.shared.term import LoopContext
from service.loops.shared.timings import rest_after
from service.storage.storage import Storage

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES, MIN_REPLY_BYTES = 1 << 20, 32 << 10
MAX_REPLIES_BYTES = 128 << 20
"""Maximum total size of the replies of all attempts, since all of these replies can be waiting to
be stored at the same time."""


class Reconciler:
    """Owns one follower task for each live attempt."""

    def __init__(self, context: LoopContext, storage: Storage) -> None:
        self._database = context.database
        self._cluster = context.cluster
        self._storage = storage
        self._launches = context.launches
        self._signals = context.signals
        self._settings = context.settings
        self._timings = context.timings
        self._writer = ReplyWriter(context.database, storage, context.prices)
        self._followers: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._refs: dict[tuple[str, int], AttemptRef] = {}
        """The current nodes of each followed attempt, which change when a group grows."""
        self._closed: set[tuple[str, int]] = set()
        """Attempts whose end was stored after the live attempts were last read."""
        self._chores: dict[tuple[object, ...], asyncio.Task[None]] = {}
        # Use a separate thread pool, so that unresponsive storage can't use up the threads of the
        # whole process.
        self._storage_readers = ThreadPoolExecutor(2, thread_name_prefix="dray-checkpoints")
        self._sent: set[tuple[str, int, str]] = set()
        """Commands that the cluster has accepted, each identified by attempt and name. The set is
        kept only in memory: after a restart of the service, the commands are sent again, which has
        no effect."""
        self._unowned_at = self._deleted_at = 0.0

    async def run(self) -> None:
        """Run until cancelled, then cancel the followers."""
        try:
            with self._signals.subscribe(ATTEMPTS) as woken:
                while True:
                    began = asyncio.get_running_loop().time()
                    try:
                        await self.run_once()
                    except Exception:
                        logger.exception("a round of the reconciler failed; the loop continues")
                    await rest_after(began)
                    await woken.wait(self._settings.scheduler_tick_s)
        finally:
            running = [*self._followers.values(), *self._chores.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._writer.close()
            self._storage_readers.shutdown(wait=False, cancel_futures=True)

    async def run_once(self) -> None:
        """Start missing followers, send commands, and end attempts that no job owns."""
        self._closed.clear()
        live, cursors = await self._database.read(self._look)
        for attempt in live:
            key = attempt.key
            if key in self._closed or (key not in self._followers and key not in cursors):
                continue  # the attempt has ended in the meantime
            self._refs[key] = ref = _ref(attempt)
            if key not in self._followers:
                self._begin_to_follow(attempt, cursors[key])
            for command in attempt.commands:
                if (*key, command.name) not in self._sent:
                    self._begin((*key, command.name), self._send(ref, command))
        if asyncio.get_running_loop().time() >= self._unowned_at:
            self._begin(("orphans",), self._end_unowned())
        if asyncio.get_running_loop().time() >= self._deleted_at:
            self._begin(("deleted",), self._drop_deleted())

    def _look(
        self, session: Session, now: datetime
    ) -> tuple[list[queue_view.FollowedAttempt], Mapping[tuple[str, int], Mapping[str, int]]]:
        """Return the launched live attempts, and the stored cursors of attempts without a
        follower."""
        found = queue_view.followed(session, now)
        live = [a for a in found if not self._launches.is_under_way(a.job_id, a.attempt)]
        new = [attempt.job_id for attempt in live if attempt.key not in self._followers]
        return live, attempts_repository.cursors(session, new)

    def _begin_to_follow(
        self, attempt: queue_view.FollowedAttempt, cursor: Mapping[str, int]
    ) -> None:
        key = attempt.key
        task = asyncio.create_task(self._follow(attempt, cursor), name=f"follow {key}")
        self._followers[key] = task
        task.add_done_callback(functools.partial(self._forget, key))

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._followers.pop(key, None)
        self._refs.pop(key, None)

    def _begin(self, what: tuple[object, ...], chore: Coroutine[Any, Any, None]) -> None:
        """Run `chore` concurrently with the loop, unless it is already running. A supervisor that
        doesn't respond must not delay other attempts."""
        if what in self._chores:
            return chore.close()
        self._chores[what] = task = asyncio.create_task(chore)
        task.add_done_callback(lambda _: self._chores.pop(what, None))
        return None

    async def _send(self, ref: AttemptRef, command: Command) -> None:
        which = (ref.job_id, ref.attempt, command.name)
        try:
            await self._cluster.send(ref, command)
        except ClusterUnavailable as error:
            logger.info("%s attempt %d has not received the command %s yet: %s", *which, error)
            await self._pause()
        else:
            self._sent.add(which)

    async def _pause(self) -> None:
        await asyncio.sleep(self._timings.unavailable_pause_s)

    async def _follow(self, attempt: queue_view.FollowedAttempt, cursor: Mapping[str, int]) -> None:
        """Poll the attempt from this cursor on and store its replies, until it has ended."""
        key, logged = attempt.key, ""
        loop, reduction = asyncio.get_running_loop(), ReplyReduction()
        claimed_at = loop.time() - attempt.age_s
        given_up = False
        while True:
            asked_at, ref = loop.time(), self._refs[key]
            try:
                reply = await self._cluster.poll(
                    ref, cursor, self._settings.poll_wait_s, self._reply_bytes
                )
                if reply.outcome is not None and ref != self._refs[key]:
                    continue  # the group has got new nodes in the meantime, which were not polled
                if not given_up and _was_never_seen(reply):
                    given_up = await self._give_up(ref, asked_at - claimed_at)
                    continue  # the attempt might have started just before it was given up
            except ClusterUnavailable as error:
                if str(error) != logged:
                    logged = str(error)
                    logger.info(
                        "no response from %s attempt %d: %s", ref.job_id, ref.attempt, logged
                    )
                await self._pause()
                continue
            try:
                in_storage = await self._checkpoints_of_ended(ref, reply.outcome)
                received = Received(ref.job_id, ref.attempt, reply, cursor, in_storage)
                recorded = await self._writer.store(reduction.reduce(received))
            except Exception as error:
                reduction.note(error)
                logger.exception("could not store a reply from %s; requesting it again", ref.job_id)
                await self._pause()
                continue
            if not recorded.live:  # the end is stored, by this process or another
                return await self._close(ref)
            cursor = recorded.cursor
            reduction.reset()
            if not reply.more and reply.phase is not Phase.ENDED:
                took_s = loop.time() - asked_at
                await asyncio.sleep(max(0.0, self._timings.reply_period_s - took_s))

    @property
    def _reply_bytes(self) -> int:
        """Maximum size of a reply."""
        share = MAX_REPLIES_BYTES // max(1, len(self._followers))
        return min(MAX_REPLY_BYTES, max(MIN_REPLY_BYTES, share))

    async def _give_up(self, ref: AttemptRef, age_s: float) -> bool:
        """Prevent an attempt without a supervisor from starting late. As long as the attempt might
        still be launched, returns False after a pause.

        This process records the end of each launch that it starts. Launches might also be in
        progress in another process, or in the gateway of a service that was killed.
        """
        ours = self._launches.is_ours(ref.job_id, ref.attempt)
        if not ours and age_s < self._timings.launch_grace_s:
            await self._pause()
            return False
        await self._cluster.give_up(ref)
        return True

    async def _checkpoints_of_ended(self, ref: AttemptRef, outcome: Outcome | None) -> list[Frame]:
        """Return reports of the attempt's checkpoints in the storage, newest first, omitting
        checkpoints that the storage does not list in time. These reports replace reports that were
        lost with their node before they were read."""
        # All reports of a successful attempt have been read, so there is no need to search the
        # storage.
        if outcome is None or outcome.cause is Cause.SUCCEEDED:
            return []
        found: list[Frame] = []

        def search() -> None:
            for report in catalog.committed(self._storage, ref.job_id, ref.attempt):
                found.append(report)

        searching = asyncio.get_running_loop().run_in_executor(self._storage_readers, search)
        try:
            # `wait_for` would lose a cancellation that arrives together with the result.
            async with asyncio.timeout(self._timings.storage_limit_s):
                await searching
        except Exception as error:  # the job must end even without these reports
            text = (
                "%s attempt %d ended, but not all of its checkpoints in the storage could be "
                "listed: %r"
            )
            logger.warning(text, ref.job_id, ref.attempt, error)
        return list(found)

    async def _close(self, ref: AttemptRef) -> None:
        """Acknowledge an attempt whose end is stored, so that the cluster forgets the attempt. If
        the cluster doesn't respond, `_end_unowned` does this later."""
        key = (ref.job_id, ref.attempt)
        self._closed.add(key)
        self._sent = {which for which in self._sent if which[:2] != key}
        self._launches.ended(ref.job_id, ref.attempt)
        try:
            await self._cluster.acknowledge(ref)
        except ClusterUnavailable as error:
            logger.info(
                "can't acknowledge the end of %s attempt %d yet: %s",
                ref.job_id,
                ref.attempt,
                error,
            )
            self._unowned_at = 0.0
        self._signals.publish(QUEUE)

    async def _end_unowned(self) -> None:
        """End attempts that still exist in the cluster although they have ended in the database.

        The database is read after the cluster. Attempts are claimed before they are launched, so
        an attempt that the cluster lists, but that is not live in the database, has ended.
        """
        self._unowned_at = asyncio.get_running_loop().time() + self._timings.unowned_period_s
        try:
            known = await self._cluster.attempts()
            live = await self._database.read(queue_view.followed)
            owned = {(a.job_id, a.attempt) for a in live} | set(self._followers)
            for ref in known:
                key = (ref.job_id, ref.attempt)
                if key not in owned:
                    logger.warning("ending %s attempt %d, which belongs to no job", *key)
                    # The supervisor might be suspended.
                    with contextlib.suppress(ClusterUnavailable):
                        await self._cluster.send(ref, Stop())
                    await self._cluster.acknowledge(ref)
        except ClusterUnavailable:
            await self._pause()
            self._unowned_at = 0.0

    async def _drop_deleted(self) -> None:
        """Make the nodes delete the files of deleted jobs.

        The nodes list the jobs whose files they keep, so a node that was unavailable deletes the
        files later. The database is read after the nodes, because a job is stored in the database
        before any node keeps files of it.
        """
        self._deleted_at = asyncio.get_running_loop().time() + self._timings.deleted_period_s
        try:
            kept = await self._cluster.kept_jobs()
            known = await self._database.read(lambda s, _: repository.existing(s, kept))
            if deleted := sorted(set(kept) - known):
                logger.info("asking the nodes to delete the files of deleted jobs: %s", deleted)
                await self._cluster.drop_jobs(deleted)
        except ClusterUnavailable:
            await self._pause()
            self._deleted_at = 0.0


def _was_never_seen(reply: PollReply) -> bool:
    """Whether the attempt has no supervisor and has never reported anything."""
    lost = reply.outcome is not None and reply.outcome.cause is Cause.SUPERVISOR_LOST
    return lost and not reply.cursor


def _ref(attempt: queue_view.FollowedAttempt) -> AttemptRef:
    return AttemptRef(
        job_id=attempt.job_id,
        attempt=attempt.attempt,
        session=attempt.cluster_session,
        node_ids=attempt.node_ids,
    )
