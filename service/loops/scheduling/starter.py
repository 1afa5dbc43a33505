"""Starts: jobs that the plan starts are claimed for new attempts, and those are launched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ray_workers.shared.contracts import WORKER_MTBF_S, AttemptSpec, RoleSlots
from ray_workers.shared.node_needs import CodeRef, RemoteCodeRef
from service.cluster.port import Cluster, ClusterUnavailable
from service.config.node_types import without_labels
from service.config.settings import Settings
from service.db.notifications import ATTEMPTS, Signals
from service.domain.attempts.group_traits import traits_of
from service.domain.documents import CheckedDocument
from service.jobs import data_policy
from service.lifecycle import claims
from service.lifecycle.claims import Claimed, Wanted
from service.loops.scheduling import mtbf, preparations
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
        seen: Callable[[Sequence[Claimed]], Awaitable[None]],
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

            async def launch(each: Claimed) -> None:
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

    async def _claim(self, wanted: Sequence[Wanted], cluster_session: str) -> list[Claimed]:
        async def claim(some: Sequence[Wanted]) -> Sequence[Claimed | None]:
            return await self._database.write(
                lambda s, at: claims.claim(s, some, cluster_session, at)
            )

        claimed = []
        for one, answer in zip(wanted, await together_or_alone(wanted, claim), strict=True):
            if isinstance(answer, Exception):
                logger.error("the job %s could not be claimed", one.job_id, exc_info=answer)
            elif answer is not None:
                claimed.append(answer)
        return claimed

    async def _launch(self, claimed: Claimed) -> None:
        await self._note_ready(claimed.job_id, claimed.attempt)
        bundle = claimed.wanted.bundle
        spec = AttemptSpec(
            deployment_id=self._deployment_id,
            job_id=claimed.job_id,
            attempt=claimed.attempt,
            spec=claimed.document,
            traits=traits_of(
                CheckedDocument(claimed.spec, claimed.document), has_gpus=bool(bundle.get("GPU"))
            ),
            slices=claimed.wanted.slices,
            bundle=without_labels(bundle),
            roles=tuple(map(_without_labels, claimed.wanted.roles)),
            storage_url=self._settings.storage_url,
            resume_from=claimed.resume_from,
            init_from=claimed.init_from,
            code=_code_of(claimed, self._settings),
            start_timeout_s=self._settings.start_timeout_s,
            max_runtime_s=claimed.max_runtime_s,
            data_policy=data_policy.policy_of(self._settings),
            environment_policy=preparations.policy_of(self._settings, claimed.owner),
            spool_limit_bytes=self._settings.spool_limit_bytes,
            output_limit_bytes=self._settings.output_limit_bytes,
            furthest_step=claimed.furthest_step,
            min_workers=claimed.min_workers,
            worker_mtbf_s=await self._worker_mtbf_s(claimed),
            silence_limit_s=self._settings.silence_limit_s,
            system_metrics_s=self._settings.system_metrics_s or None,
            array_index=claimed.array_index,
            parameters=claimed.parameters,
            silo_sources=claimed.silo_sources,
        )
        try:
            await self._cluster.launch(spec)
        except ClusterUnavailable as error:
            # Nobody knows whether the attempt started. The reconciler finds out, and ends it if it
            # did not; a gateway that is still launching says so when it is polled.
            logger.warning(
                "the launch of %s attempt %d is in doubt: %s", spec.job_id, spec.attempt, error
            )

    async def _worker_mtbf_s(self, claimed: Claimed) -> float:
        if not mtbf.asks(claimed.spec):
            return WORKER_MTBF_S
        return await self._database.read(lambda s, now: mtbf.worker_mtbf(s, claimed.job_id, now))


def _without_labels(role: RoleSlots) -> RoleSlots:
    return replace(role, bundle=without_labels(role.bundle))


def _code_of(claimed: Claimed, settings: Settings) -> CodeRef | RemoteCodeRef | None:
    row, remote = claimed.code, claimed.spec.remote_code
    if remote is not None:
        return preparations.code_of(remote, settings)
    if row is None:
        return None
    url = f"{settings.storage_url.rstrip('/')}/{row.manifest_key}"
    return CodeRef(row.id, url, row.manifest_sha256)
