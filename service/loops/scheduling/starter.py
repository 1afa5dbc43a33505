"""Starts: jobs that the plan starts are claimed for new attempts, and those are launched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ray_workers.shared.contracts import AttemptSpec
from service.cluster.port import Cluster, ClusterUnavailable
from service.config.settings import Settings
from service.db.notifications import ATTEMPTS, Signals
from service.lifecycle import claims
from service.lifecycle.claims import Deployment, Wanted
from service.loops.scheduling import mtbf
from service.loops.shared.batches import together_or_alone
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.launches import Launches

logger = logging.getLogger(__name__)

MAX_LAUNCHES = 16
"""Launches that are under way at once."""


class Starter:
    """Starts jobs on the cluster."""

    def __init__(
        self,
        database: LoopDatabase,
        cluster: Cluster,
        launches: Launches,
        signals: Signals,
        settings: Settings,
        deployment_id: str,
        note_ready: Callable[[str, int], Awaitable[None]],
    ) -> None:
        """note_ready: is called with each job and its attempt before the launch."""
        self._database = database
        self._cluster = cluster
        self._launches = launches
        self._signals = signals
        self._settings = settings
        self._deployment_id = deployment_id
        self._note_ready = note_ready

    async def start(
        self,
        wanted: Sequence[Wanted],
        cluster_session: str,
        seen: Callable[[Sequence[AttemptSpec]], Awaitable[None]],
    ) -> int:
        """Claim these jobs for new attempts and launch those; answers how many were claimed.

        seen: is told of them before they are launched.
        """
        for one in wanted:
            self._launches.begin(one.job_id, one.attempt_seen + 1)
        under_way = {one.job_id: one.attempt_seen + 1 for one in wanted}
        try:
            claimed = await self._claim(wanted, cluster_session)
            for each in claimed:
                self._launches.claimed(each.job_id, each.attempt)
            await seen(claimed)
            at_once = asyncio.Semaphore(MAX_LAUNCHES)

            async def launch(each: AttemptSpec) -> None:
                async with at_once:
                    try:
                        await self._launch(each)
                    except Exception:
                        # The others go on. The reconciler ends the attempt if it did not come.
                        logger.exception("the launch of %s failed", each.job_id)
                self._launches.answered(each.job_id, under_way.pop(each.job_id))
                self._signals.publish(ATTEMPTS)

            await asyncio.gather(*map(launch, claimed))
            return len(claimed)
        finally:
            for job_id, attempt in under_way.items():
                self._launches.answered(job_id, attempt)
            self._signals.publish(ATTEMPTS)

    async def _claim(self, wanted: Sequence[Wanted], cluster_session: str) -> list[AttemptSpec]:
        deployment = Deployment(self._deployment_id, cluster_session, self._settings)

        async def claim(some: Sequence[Wanted]) -> Sequence[AttemptSpec | None]:
            return await self._database.write(lambda s, at: claims.claim(s, some, deployment, at))

        claimed = []
        for one, answer in zip(wanted, await together_or_alone(wanted, claim), strict=True):
            if isinstance(answer, Exception):
                logger.error("the job %s could not be claimed", one.job_id, exc_info=answer)
            elif answer is not None:
                claimed.append(answer)
        return claimed

    async def _launch(self, spec: AttemptSpec) -> None:
        await self._note_ready(spec.job_id, spec.attempt)
        if mtbf.asks(spec.spec):
            found = await self._database.read(lambda s, at: mtbf.worker_mtbf(s, spec.job_id, at))
            spec = replace(spec, worker_mtbf_s=found)
        try:
            await self._cluster.launch(spec)
        except ClusterUnavailable as error:
            # Nobody knows whether the attempt started. The reconciler finds out, and ends it if it
            # did not; a gateway that is still launching says so when it is polled.
            logger.warning(
                "the launch of %s attempt %d is in doubt: %s", spec.job_id, spec.attempt, error
            )
