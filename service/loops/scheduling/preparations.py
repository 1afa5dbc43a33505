"""Prepares nodes for the jobs that are about to start there: their environments, and fetched code.

A job whose needs are not ready on each of these nodes waits, and holds no slot meanwhile. The
nodes are asked beside the scheduler's rounds, so a node that does not answer holds up the jobs that
would start there and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from dray.spec import Environment
from dray.spec.program.code import RemoteCode
from ray_workers.shared.node_needs import (
    BuildState,
    JobNeed,
    NodeEnvironment,
    NodeNeeds,
)
from service.cluster.port import Cluster, ClusterSnapshot, ClusterUnavailable
from service.config import node_policies
from service.config.settings import Settings
from service.db.notifications import QUEUE, Signals
from service.db.repositories import jobs as repository
from service.domain.scheduling import policy
from service.domain.text import clean
from service.lifecycle import environment_events
from service.loops.shared.fencing import LoopDatabase

logger = logging.getLogger(__name__)

BELIEVED_S = 30.0
"""How long an answer counts before the node is asked again. It is much less than the time for
which a node keeps an environment that nobody uses."""
MAX_PLANS = 5
"""How often a round plans anew without jobs whose needs are not ready; those that the last plan
would start wait for the next round, which begins without the others."""
PLANNED_ANEW_S = 30.0
"""How long a job waits for the nodes of one plan, before it may be planned on others."""
FORGOTTEN_S = 60.0
"""After how long without a job that is about to start there a node is asked seldom."""
SELDOM_S = 15.0
"""Pause between two questions then, by which the node knows that a job in the queue needs it. It is
much less than `environments.turns.WANTED_S`."""
BUILDING_S = 0.1
"""Before a node that builds is asked again; its answer takes a while by itself."""
MAX_MESSAGE = 2000
"""Characters of an installer's own sentence, and of all that is told of why a job waits."""
ASK_AGAIN_S = 1.0
"""Before a node that did not answer, or met an index that did not, is asked again."""


IS_PREPARED: Mapping[JobNeed, str] = {
    JobNeed.ENVIRONMENT: "its environment is being prepared",
    JobNeed.CODE: "its code is being fetched",
}


def needs_of(document: Mapping[str, Any], owner: str, settings: Settings) -> NodeNeeds | None:
    """The part of a job's document that nodes prepare; None if there is nothing to prepare."""
    script = document.get("script") or {}
    try:
        environment = _environment_of(document.get("environment"))
        source = script.get("code")
        code = None
        if isinstance(source, Mapping):
            code = node_policies.code_of(RemoteCode.model_validate(source), settings)
    except ValidationError:
        return None  # of another release; the claim refuses the document
    if environment is None and code is None:
        return None
    keeps_all = document.get("script") is None
    return NodeNeeds(
        environment, keeps_all, node_policies.environment_policy(settings, owner), code
    )


def _environment_of(found: object) -> dict[str, Any] | None:
    if found is None:
        return None
    environment = Environment.model_validate(found)
    index_secret = environment.index is not None and environment.index.secret is not None
    if not (environment.is_built or environment.secrets or index_secret):
        return None
    # Variables are no business of the node's agent.
    return environment.model_dump(mode="json", exclude={"env"})


def _digest_of(needs: NodeNeeds) -> str:
    text = json.dumps(asdict(needs), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class _Question:
    """A question to one node, until its answer is final."""

    needs: NodeNeeds
    node_id: str
    wanted_at: float
    """When a job needed the answer last, by the loop's clock."""
    jobs: set[str]
    """Those that have needed the answer, and are still in the queue."""
    answer: NodeEnvironment | None = None
    answered_at: float = 0.0
    silent: str = "has not answered yet"
    task: asyncio.Task[None] | None = None
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a job needs the answer."""

    @property
    def is_settled(self) -> bool:
        return self.answer is not None and self.answer.state in (
            BuildState.READY,
            BuildState.FAILED,
        )

    def is_over(self, now: float) -> bool:
        """Whether it has to be asked anew: its answer is old, or nobody asks for it any more."""
        if self.is_settled:
            return now - self.answered_at > BELIEVED_S
        return self.task is not None and self.task.done()

    @property
    def need(self) -> JobNeed:
        """The need that the node is about to meet, as far as it has said."""
        if self.answer is not None:
            return self.answer.need
        return JobNeed.CODE if self.needs.environment is None else JobNeed.ENVIRONMENT

    @property
    def sentence(self) -> str:
        """How far the node is."""
        if self.answer is None:
            return self.silent
        if self.answer.state is BuildState.UNREACHABLE:
            return f"tries again: {self.answer.message}"
        return self.answer.message


@dataclass(frozen=True)
class Readiness:
    """The nodes of a plan and what a job needs there."""

    environments: tuple[NodeEnvironment, ...]
    """Of the nodes that are ready; empty if the job has none."""
    failure: NodeEnvironment | None
    waiting: str | None
    """Why the job waits; None if all nodes are ready or one has failed."""

    is_long: bool
    """Whether a node has said that it takes a while."""

    @property
    def is_ready(self) -> bool:
        return self.waiting is None and self.failure is None


def _storable(answer: NodeEnvironment) -> NodeEnvironment:
    """The answer with texts that a database can hold: indexes, repositories and installers have
    words of their own in it."""
    return replace(
        answer,
        message=clean(answer.message)[:MAX_MESSAGE],
        packages=tuple(map(clean, answer.packages)),
        replaced=tuple(map(clean, answer.replaced)),
        log=clean(answer.log),
    )


class Preparations:
    """Answers of nodes on what jobs need. For one event loop."""

    def __init__(self, cluster: Cluster, signals: Signals) -> None:
        self._cluster = cluster
        self._signals = signals
        self._questions: dict[tuple[str, str], _Question] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Of questions that no job needs any more, until their nodes know it."""

    def check(
        self, job_id: str, needs: NodeNeeds, node_ids: Sequence[str], names: Mapping[str, str]
    ) -> Readiness:
        """How far these nodes are with what a job needs; those that have not said are asked.
        names: hosts by node."""
        found = {node_id: self._question(job_id, needs, node_id) for node_id in node_ids}
        answers = [q.answer for q in found.values() if q.is_settled and q.answer is not None]
        failure = next((a for a in answers if a.state is BuildState.FAILED), None)
        missing = {node: question for node, question in found.items() if not question.is_settled}
        waiting = None
        if missing and failure is None:
            told = "; ".join(f"{names.get(n, n)} {q.sentence}" for n, q in missing.items())
            needs_now = {question.need for question in missing.values()}
            need = min(needs_now, key=list(IS_PREPARED).index)
            waiting = f"{IS_PREPARED[need]}: {told}"[:MAX_MESSAGE]
        ready = tuple(
            a for a in answers if a.state is BuildState.READY and a.need is JobNeed.ENVIRONMENT
        )
        is_long = any(question.answer is not None for question in missing.values())
        return Readiness(ready, failure, waiting, is_long)

    def keep(self, job_ids: Set[str]) -> None:
        """Only these jobs wait and may need something: nodes end what they prepare for others."""
        for key, question in list(self._questions.items()):
            question.jobs &= job_ids
            if question.jobs or question.task is None or question.task.done():
                continue
            del self._questions[key]
            question.needed.set()
            self._leaving.add(question.task)
            question.task.add_done_callback(self._leaving.discard)

    async def _forget_on_node(self, question: _Question) -> None:
        try:
            await self._cluster.forget(question.node_id, question.needs)
        except ClusterUnavailable:
            pass  # a node ends by itself what is not asked for
        except Exception:
            logger.exception("a node could not be told what no job needs any more")

    def _question(self, job_id: str, needs: NodeNeeds, node_id: str) -> _Question:
        now = asyncio.get_running_loop().time()
        self._forget(now)
        key = (_digest_of(needs), node_id)
        known = self._questions.get(key)
        if known is None or known.is_over(now):
            known = self._questions[key] = _Question(needs, node_id, now, {job_id})
            known.task = asyncio.ensure_future(self._ask(known))
        known.wanted_at = now
        known.jobs.add(job_id)
        known.needed.set()
        return known

    def _forget(self, now: float) -> None:
        for key, question in list(self._questions.items()):
            if now - question.wanted_at > FORGOTTEN_S and (
                question.is_settled or not question.jobs
            ):
                del self._questions[key]

    def forget_failure(self, needs: NodeNeeds, node_ids: Collection[str]) -> None:
        """A job has failed for it: the next one is another try."""
        digest = _digest_of(needs)
        for node_id in node_ids:
            question = self._questions.get((digest, node_id))
            if question is not None and question.is_settled:
                del self._questions[(digest, node_id)]

    async def _ask(self, question: _Question) -> None:
        """Ask until the node is ready or has failed, or no job is left that needs it. The node is
        told of that after its last answer, so that no question comes later."""
        loop = asyncio.get_running_loop()
        while question.jobs:
            try:
                answer = await self._cluster.prepare(question.node_id, question.needs)
                question.answer = _storable(answer)
            except ClusterUnavailable as error:
                question.answer, question.silent = None, clean(f"does not answer: {error}")
            except Exception:
                logger.exception("a node could not be asked what it has")
                question.answer, question.silent = None, "could not be asked"
            question.answered_at = loop.time()
            if question.is_settled:
                self._signals.publish(QUEUE)
                return
            building = question.answer and question.answer.state is BuildState.BUILDING
            if loop.time() - question.wanted_at <= FORGOTTEN_S:
                await asyncio.sleep(BUILDING_S if building else ASK_AGAIN_S)
                continue
            question.needed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SELDOM_S):
                    await question.needed.wait()
        await self._forget_on_node(question)

    def close(self) -> None:
        asking = (question.task for question in self._questions.values())
        for task in (*asking, *self._leaving):
            if task is not None:
                task.cancel()


@dataclass(frozen=True)
class _Awaited:
    """The nodes that a job waits for."""

    node_ids: tuple[str, ...]
    until: float
    """By the loop's clock."""


_PLACED = (policy.Start, policy.Wait, policy.Grow)
"""Decisions that may name slots."""


class EnvironmentGate:
    """Plans, and lets jobs start whose needs are ready on every node of the plan."""

    def __init__(
        self, database: LoopDatabase, preparations: Preparations, settings: Settings
    ) -> None:
        self._database = database
        self._preparations = preparations
        self._settings = settings
        self._needs: dict[str, NodeNeeds | None] = {}
        """By job, of those that were about to start and have not gone."""
        self._awaited: dict[str, _Awaited] = {}
        """Of the jobs and groups that are held."""
        self._ready: dict[str, tuple[NodeEnvironment, ...]] = {}
        self._told: set[str] = set()
        self._not_planned: set[tuple[str, type[Exception]]] = set()
        """Jobs, and their errors, that the log has already."""
        self.seen: policy.Snapshot | None = None
        """The snapshot of the last question to the policy, with the jobs that wait for a node."""

    def close(self) -> None:
        self._preparations.close()

    def keep(self, snapshot: policy.Snapshot) -> None:
        """Forget the jobs that do not wait any more, and have nodes end what they prepare for no
        other ones."""
        there = {job.job_id for job in snapshot.queue} | {g.job_id for g in snapshot.growing}
        self._needs = {job_id: needs for job_id, needs in self._needs.items() if job_id in there}
        self._ready = {job_id: ready for job_id, ready in self._ready.items() if job_id in there}
        self._told &= there
        self._not_planned = {each for each in self._not_planned if each[0] in there}
        self._preparations.keep(there)

    async def plan(
        self, snapshot: policy.Snapshot, now: datetime, cluster: ClusterSnapshot | None
    ) -> list[policy.Decision]:
        """As `policy.plan`; a job whose needs are not ready takes no slot and waits, and one whose
        environment can't be installed, or whose code can't be had, fails."""
        names = {} if cluster is None else {n.node_id: n.hostname for n in cluster.nodes}
        attempts = {job.job_id: job.attempt for job in snapshot.queue}
        waiting = await self._still_waiting(snapshot, attempts, names)
        for _ in range(MAX_PLANS):
            self.seen = _without(snapshot, waiting)
            # A long queue takes long, and callers wait for this thread.
            plan = functools.partial(policy.plan, on_error=self._note_error)
            decisions = await asyncio.to_thread(plan, self.seen, now)
            held = await self._held(decisions, attempts, names)
            if not held:
                break
            decisions = [d for d in decisions if not _is_for(d, held)]
            waiting |= held
        return [*decisions, *_stays(snapshot.growing, waiting)]

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


def _without(snapshot: policy.Snapshot, waiting: Mapping[str, str]) -> policy.Snapshot:
    """As it is, but jobs that wait for nodes take no slots.

    waiting: what each of them waits for.
    """
    if not waiting:
        return snapshot
    queue = (
        replace(job, preparing=waiting[job.job_id]) if job.job_id in waiting else job
        for job in snapshot.queue
    )
    growing = (group for group in snapshot.growing if group.job_id not in waiting)
    return replace(snapshot, queue=tuple(queue), growing=tuple(growing))


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
