"""The environment gate, which ensures that jobs start only on nodes on which their environment and
code are ready.

A job whose environment or code is not ready on every node of its plan waits without holding slots,
and the round makes another plan without this job.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.node_needs import NodeEnvironment, NodeNeeds
from service.db.repositories import jobs as repository
from service.domain.scheduling import policy
from service.domain.scheduling.rules.obstacles import PREPARING
from service.lifecycle import environment_events
from service.loops.scheduling.preparations import Preparations, Readiness, needs_of
from service.loops.scheduling.stages import SchedulerRound, Stage, held_back
from service.loops.shared.term import LoopContext

logger = logging.getLogger(__name__)

MAX_PLANS = 5
"""Maximum number of plans in a round. Each plan excludes the jobs that were not ready in the
previous plans. If the last plan still starts jobs that are not ready, these jobs wait for the next
round, whose first plan excludes all jobs that were not ready in this round."""
PLANNED_ANEW_S = 30.0
"""Seconds that a job waits for the nodes of one plan before it can be planned on other nodes."""


@dataclass(frozen=True)
class _Awaited:
    """The nodes for which a job waits."""

    node_ids: tuple[str, ...]
    until: float
    """A time on the event loop's clock."""


_PLACED = (policy.Start, policy.Wait, policy.Grow)
"""Decisions that can assign slots."""


class EnvironmentGate(Stage):
    """Runs the policy, and starts only jobs whose environment and code are ready on every node of
    their plan."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._preparations = Preparations(context.cluster, context.signals)
        self._settings = context.settings
        self._needs: dict[str, NodeNeeds | None] = {}
        """The environment and code of each job that was about to start and is still waiting or
        growing."""
        self._awaited: dict[str, _Awaited] = {}
        """The nodes for which each held job or group waits."""
        self._ready: dict[str, tuple[NodeEnvironment, ...]] = {}
        self._noted: set[str] = set()
        """Jobs that have an event about their preparation."""
        self._not_planned: set[tuple[str, type[Exception]]] = set()
        """Pairs of a job and a kind of error that were already logged."""

    def close(self) -> None:
        self._preparations.close()

    async def before(self, seen: SchedulerRound) -> None:
        """Forget the jobs that no longer wait, and let nodes stop preparations that only these jobs
        needed."""
        snapshot = seen.snapshot
        kept = {job.job_id for job in snapshot.queue} | {g.job_id for g in snapshot.growing}
        self._needs = {job_id: needs for job_id, needs in self._needs.items() if job_id in kept}
        self._ready = {job_id: ready for job_id, ready in self._ready.items() if job_id in kept}
        self._noted &= kept
        self._not_planned = {each for each in self._not_planned if each[0] in kept}
        self._preparations.keep(kept)

    async def plan(self, seen: SchedulerRound) -> None:
        """Decide with `policy.plan`. A job that is not ready waits without taking slots, and a job
        whose environment can't be installed or whose code can't be fetched fails."""
        snapshot, cluster = seen.snapshot, seen.cluster
        names = {} if cluster is None else {n.node_id: n.hostname for n in cluster.nodes}
        attempts = {job.job_id: job.attempt for job in snapshot.queue}
        waiting = await self._still_waiting(snapshot, attempts, names)
        for _ in range(MAX_PLANS):
            seen.asked = held_back(snapshot, waiting)
            # Plan in another thread, because planning a long queue takes a long time and this
            # thread must remain available to callers.
            plan = functools.partial(policy.plan, on_error=self._note_error)
            decisions = await asyncio.to_thread(plan, seen.asked, seen.now)
            held = await self._held(decisions, attempts, names)
            if not held:
                break
            decisions = [d for d in decisions if not _is_for(d, held)]
            waiting |= held
        seen.decisions = seen.planned = [*decisions, *_stays(snapshot.growing, waiting)]

    def _note_error(self, job_id: str, error: Exception) -> None:
        """Log why a job can't be planned, once for each job and kind of error."""
        if (job_id, type(error)) not in self._not_planned:
            self._not_planned.add((job_id, type(error)))
            logger.error("%s can't be planned: %s", job_id, error, exc_info=error)

    async def _still_waiting(
        self, snapshot: policy.Snapshot, attempts: Mapping[str, int], names: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the reasons why jobs that an earlier round held back are still waiting, keyed by
        job id."""
        accepted = {node.id for node in snapshot.nodes if node.accepted}
        now = asyncio.get_running_loop().time()
        waiting = {}
        for job_id, awaited in list(self._awaited.items()):
            needs = self._needs.get(job_id)
            is_over = now > awaited.until or not accepted.issuperset(awaited.node_ids)
            if needs is None or is_over:
                del self._awaited[job_id]
                continue
            readiness = self._preparations.check(job_id, needs, awaited.node_ids, names)
            if readiness.waiting is None:
                del self._awaited[job_id]
                continue
            waiting[job_id] = readiness.waiting
            if job_id in attempts:
                await self._note(job_id, attempts[job_id], readiness, readiness.waiting)
        return waiting

    async def _held(
        self,
        decisions: Sequence[policy.Decision],
        attempts: Mapping[str, int],
        names: Mapping[str, str],
    ) -> dict[str, str]:
        """Return the reason for each job in these decisions that can't start or grow yet. The
        result includes jobs for which other jobs must release slots first."""
        due = [d for d in decisions if isinstance(d, _PLACED) and d.slices]
        unknown = [d.job_id for d in due if d.job_id not in self._needs]
        if unknown:
            found = await self._database.read(lambda s, _: repository.documents(s, unknown))
            self._needs |= {
                job_id: needs_of(*both, self._settings) for job_id, both in found.items()
            }
        held: dict[str, str] = {}
        for decision in due:
            needs = self._needs.get(decision.job_id)
            if needs is None:
                continue
            node_ids = [part.node_id for part in decision.slices]
            readiness = self._preparations.check(decision.job_id, needs, node_ids, names)
            if readiness.is_ready:
                self._ready[decision.job_id] = readiness.environments
                continue
            failure = readiness.failure
            if isinstance(decision, policy.Wait) and not failure and decision.job_id in self._ready:
                continue  # the job was ready before, so it keeps the promised slots
            why_not = "" if failure is None else environment_events.sentence_of(failure)
            reason = readiness.waiting or why_not
            held[decision.job_id] = reason
            if readiness.waiting is not None:
                until = asyncio.get_running_loop().time() + PLANNED_ANEW_S
                self._awaited[decision.job_id] = _Awaited(tuple(node_ids), until)
            if not isinstance(decision, policy.Grow):
                await self._note(decision.job_id, attempts[decision.job_id], readiness, reason)
                if failure is not None:
                    self._preparations.forget_failure(needs, node_ids)
        return held

    async def _note(self, job_id: str, attempt: int, readiness: Readiness, reason: str) -> None:
        """Fail the job if the preparation on a node failed. If the preparation has not failed but
        takes a long time, add an event once."""
        failure = readiness.failure
        if failure is not None:
            await self._database.write(
                lambda s, at: environment_events.fail(s, job_id, attempt, failure, at)
            )
        elif readiness.is_long and job_id not in self._noted:
            self._noted.add(job_id)
            await self._database.write(
                lambda s, at: environment_events.note_preparing(s, job_id, reason, at)
            )

    async def note_ready(self, job_id: str, attempt: int) -> None:
        """Add an event about the ready environments to the job after it was claimed."""
        answers = self._ready.pop(job_id, None)
        if answers:
            await self._database.write(
                lambda s, at: environment_events.note_ready(s, job_id, attempt, answers, at)
            )


def _is_for(decision: policy.Decision, jobs: Mapping[str, str]) -> bool:
    """Whether the decision gives slots to one of these jobs, or frees slots for such a job."""
    if isinstance(decision, policy.Preempt | policy.Shrink):
        return decision.because_of in jobs
    return decision.job_id in jobs


def _stays(
    growing: Sequence[policy.Growing], waiting: Mapping[str, str]
) -> Iterator[policy.Decision]:
    """Yield a decision for each group whose growth waits for a node. Other jobs don't have to wait
    for this node."""
    for group in growing:
        if group.job_id in waiting:
            reason = policy.Reason(PREPARING, waiting[group.job_id])
            yield policy.Stay(group.job_id, reason)
