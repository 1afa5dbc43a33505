"""Claims the jobs that the plan starts, and launches their attempts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from ray_workers.shared.contracts import WORKER_MTBF_S, AttemptSpec, Cause
from service.cluster.port import ClusterUnavailable
from service.db.notifications import ATTEMPTS
from service.db.repositories import attempts as repository
from service.db.repositories.bulk import in_chunks
from service.domain.attempts.reliability import Seen, worker_mtbf_s
from service.domain.scheduling import policy
from service.lifecycle import claims
from service.lifecycle.claims import Deployment, Wanted
from service.loops.scheduling.environment_gate import EnvironmentGate
from service.loops.scheduling.stages import SchedulerRound, Stage
from service.loops.scheduling.trial_values import TrialValues
from service.loops.scheduling.used_shares import UsedShares
from service.loops.shared.batches import together_or_alone
from service.loops.shared.term import LoopContext

logger = logging.getLogger(__name__)

MAX_CLAIMS = 200
"""Maximum number of claims in one transaction. The limit is needed because SQLite has only one
writer, and other writes have to wait."""
MAX_LAUNCHES = 16
"""Maximum number of concurrent launches."""
LOSSES = (Cause.WORKER_LOST, Cause.NODE_LOST, Cause.SUPERVISOR_LOST, Cause.INFRASTRUCTURE)
"""Causes that count as lost workers. Preemptions are not included, because a job saves its state
before a preemption. User errors are not included, because they don't depend on the machines."""
OVERLOAD = "the machine is overloaded"
"""A phrase that `machine_speed` includes in the reason if an attempt ended because its machines
were too slow. Such an attempt has lost no worker."""
LOOK_BACK = timedelta(days=30)
"""Maximum age of the attempts from which a launch estimates how often workers are lost."""


class Starter(Stage):
    """Claims the jobs that the round starts, and launches their attempts."""

    def __init__(
        self,
        context: LoopContext,
        gate: EnvironmentGate,
        trial_values: TrialValues,
        used: UsedShares,
    ) -> None:
        self._database = context.database
        self._cluster = context.cluster
        self._launches = context.launches
        self._signals = context.signals
        self._settings = context.settings
        self._models = context.models
        self._deployment_id = context.deployment_id
        self._halted = context.halted
        self._gate = gate
        self._trial_values = trial_values
        self._used = used

    async def after(self, seen: SchedulerRound) -> None:
        by_id = {job.job_id: job for job in seen.snapshot.queue}
        wanted = [
            _wanted(by_id[decision.job_id], decision)
            for decision in seen.decisions
            if isinstance(decision, policy.Start)
            and not self._trial_values.is_asked_for(decision.job_id)
        ]
        if not wanted:
            return
        assert seen.cluster is not None, "the plan starts jobs, but the cluster's state is unknown"
        began = asyncio.get_running_loop().time()
        for some in in_chunks(wanted, MAX_CLAIMS):
            if self._halted.is_set():
                break
            await self._start(some, seen.cluster.session)
        seen.starting_s = asyncio.get_running_loop().time() - began

    async def _start(self, wanted: Sequence[Wanted], cluster_session: str) -> None:
        """Claim these jobs for new attempts, and launch the attempts."""
        for one in wanted:
            self._launches.begin(one.job_id, one.attempt_seen + 1)
        under_way = {one.job_id: one.attempt_seen + 1 for one in wanted}
        try:
            claimed = await self._claim(wanted, cluster_session)
            for each in claimed:
                self._launches.claimed(each.job_id, each.attempt)
            self._used.claimed((each.job_id, each.attempt) for each in claimed)
            if len(claimed) < len(wanted):
                taken = {each.job_id for each in claimed}
                await self._trial_values.ask(w.job_id for w in wanted if w.job_id not in taken)
            at_once = asyncio.Semaphore(MAX_LAUNCHES)

            async def launch(each: AttemptSpec) -> None:
                async with at_once:
                    try:
                        await self._launch(each)
                    except Exception:
                        # Continue with the other launches. If the attempt has not started, the
                        # reconciler ends it.
                        logger.exception("the launch of %s failed", each.job_id)
                self._launches.answered(each.job_id, under_way.pop(each.job_id))
                self._signals.publish(ATTEMPTS)

            await asyncio.gather(*map(launch, claimed))
        finally:
            for job_id, attempt in under_way.items():
                self._launches.answered(job_id, attempt)
            self._signals.publish(ATTEMPTS)

    async def _claim(self, wanted: Sequence[Wanted], cluster_session: str) -> list[AttemptSpec]:
        deployment = Deployment(
            self._deployment_id, cluster_session, self._settings, self._models.current() or {}
        )

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
        await self._gate.note_ready(spec.job_id, spec.attempt)
        if saves_by_losses(spec.spec):
            found = await self._database.read(lambda s, at: worker_mtbf(s, spec.job_id, at))
            spec = replace(spec, worker_mtbf_s=found)
        try:
            await self._cluster.launch(spec)
        except ClusterUnavailable as error:
            # The attempt might have started, or a gateway might still be launching it. The
            # reconciler polls the attempt, and ends it if it has not started and is not being
            # launched.
            logger.warning(
                "it is unknown whether %s attempt %d has started: %s",
                spec.job_id,
                spec.attempt,
                error,
            )


def _wanted(job: policy.WaitingJob, start: policy.Start) -> Wanted:
    asked = job.request
    return Wanted(
        *(job.job_id, job.attempt, job.queue, start.slices, asked.bundle, asked.roles),
        request_seen=asked,
        array_limit_seen=None if job.array is None else job.array.max_running,
        reservation_seen=job.reservation,
    )


def saves_by_losses(document: Mapping[str, Any]) -> bool:
    """Whether the job's checkpoint interval depends on how often workers are lost."""
    return bool(document["checkpoint"]["every_steps"] == "auto")


def worker_mtbf(session: Session, job_id: str, now: datetime) -> float:
    """Estimate the mean number of seconds between two losses of a worker, from the attempts in
    `LOOK_BACK`."""
    ended = repository.ended(session, since=now - LOOK_BACK)
    return worker_mtbf_s(
        _seen(ended), _seen(row for row in ended if row.job_id == job_id), prior_s=WORKER_MTBF_S
    )


def _seen(rows: Iterable[Row[Any, Any, Any, Any, Any, Any]]) -> Seen:
    worker_s, num_losses = 0.0, 0
    for row in rows:
        worker_s += row.world_size * max(0.0, (row.finished_at - row.started_at).total_seconds())
        num_losses += row.reason_code in LOSSES and OVERLOAD not in (row.reason_message or "")
    return Seen(worker_s, num_losses)
