"""The gate of the scheduler's plans: jobs start where their environment and code are ready.

A job whose needs are not ready on each node of a plan waits, and holds no slot meanwhile; the
policy is asked again without it.
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
from service.lifecycle import environment_events
from service.loops.scheduling.preparations import Preparations, Readiness, needs_of
from service.loops.scheduling.stages import SchedulerRound, Stage, held_back
from service.loops.shared.term import LoopContext

logger = logging.getLogger(__name__)

MAX_PLANS = 5
"""How often a round plans anew without jobs whose needs are not ready; those that the last plan
would start wait for the next round, which begins without the others."""
PLANNED_ANEW_S = 30.0
"""How long a job waits for the nodes of one plan, before it may be planned on others."""


@dataclass(frozen=True)
class _Awaited:
    """The nodes that a job waits for."""

    node_ids: tuple[str, ...]
    until: float
    """By the loop's clock."""


_PLACED = (policy.Start, policy.Wait, policy.Grow)
"""Decisions that may name slots."""


class EnvironmentGate(Stage):
    """Asks the policy, and lets jobs start whose needs are ready on every node of the plan."""

    def __init__(self, context: LoopContext) -> None:
        self._database = context.database
        self._preparations = Preparations(context.cluster, context.signals)
        self._settings = context.settings
        self._needs: dict[str, NodeNeeds | None] = {}
        """By job, of those that were about to start and have not gone."""
        self._awaited: dict[str, _Awaited] = {}
        """Of the jobs and groups that are held."""
        self._ready: dict[str, tuple[NodeEnvironment, ...]] = {}
        self._told: set[str] = set()
        self._not_planned: set[tuple[str, type[Exception]]] = set()
        """Jobs, and their errors, that the log has already."""

    def close(self) -> None:
        self._preparations.close()

    async def before(self, seen: SchedulerRound) -> None:
        """Forget the jobs that do not wait any more, and have nodes end what they prepare for no
        other ones."""
        snapshot = seen.snapshot
        there = {job.job_id for job in snapshot.queue} | {g.job_id for g in snapshot.growing}
        self._needs = {job_id: needs for job_id, needs in self._needs.items() if job_id in there}
        self._ready = {job_id: ready for job_id, ready in self._ready.items() if job_id in there}
        self._told &= there
        self._not_planned = {each for each in self._not_planned if each[0] in there}
        self._preparations.keep(there)

    async def plan(self, seen: SchedulerRound) -> None:
        """Decide as `policy.plan`; but a job whose needs are not ready takes no slot and waits, and
        one whose environment can't be installed, or whose code can't be fetched, fails."""
        snapshot, cluster = seen.snapshot, seen.cluster
        names = {} if cluster is None else {n.node_id: n.hostname for n in cluster.nodes}
        attempts = {job.job_id: job.attempt for job in snapshot.queue}
        waiting = await self._still_waiting(snapshot, attempts, names)
        for _ in range(MAX_PLANS):
            seen.asked = held_back(snapshot, waiting)
            # A long queue takes long, and callers wait for this thread.
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
        """Why those that an earlier round held still wait for the nodes of that plan."""
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
                await self._tell(job_id, attempts[job_id], readiness, readiness.waiting)
        return waiting

    async def _held(
        self,
        decisions: Sequence[policy.Decision],
        attempts: Mapping[str, int],
        names: Mapping[str, str],
    ) -> dict[str, str]:
        """Why each of the jobs that would start, now or once others have made room, or grow, may
        not yet."""
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
                continue  # it was ready, and is asked anew: it keeps its promised slots meanwhile
            why_not = "" if failure is None else environment_events.sentence_of(failure)
            reason = readiness.waiting or why_not
            held[decision.job_id] = reason
            if readiness.waiting is not None:
                until = asyncio.get_running_loop().time() + PLANNED_ANEW_S
                self._awaited[decision.job_id] = _Awaited(tuple(node_ids), until)
            if not isinstance(decision, policy.Grow):
                await self._tell(decision.job_id, attempts[decision.job_id], readiness, reason)
                if failure is not None:
                    self._preparations.forget_failure(needs, node_ids)
        return held

    async def _tell(self, job_id: str, attempt: int, readiness: Readiness, reason: str) -> None:
        failure = readiness.failure
        if failure is not None:
            await self._database.write(
                lambda s, at: environment_events.fail(s, job_id, attempt, failure, at)
            )
        elif readiness.is_long and job_id not in self._told:
            self._told.add(job_id)
            await self._database.write(
                lambda s, at: environment_events.note_preparing(s, job_id, reason, at)
            )

    async def note_ready(self, job_id: str, attempt: int) -> None:
        """Put into the job's history what it found, once it was claimed."""
        answers = self._ready.pop(job_id, None)
        if answers:
            await self._database.write(
                lambda s, at: environment_events.note_ready(s, job_id, attempt, answers, at)
            )


def _is_for(decision: policy.Decision, jobs: Mapping[str, str]) -> bool:
    """Whether it gives slots to one of these jobs, or makes room for it."""
    if isinstance(decision, policy.Preempt | policy.Shrink):
        return decision.because_of in jobs
    return decision.job_id in jobs


def _stays(
    growing: Sequence[policy.Growing], waiting: Mapping[str, str]
) -> Iterator[policy.Decision]:
    """Of the groups that could grow and wait for a node: it is no reason for others to wait."""
    for group in growing:
        if group.job_id in waiting:
            reason = policy.Reason("preparing_environment", waiting[group.job_id])
            yield policy.Stay(group.job_id, reason)
