"""Prepares nodes for the jobs that are about to start on them: environments and fetched code.

A job whose environment or code is not ready on all of these nodes waits without holding slots. The
nodes are asked concurrently with the scheduler's rounds, so a node that doesn't respond delays only
jobs that would start on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from dray.spec import Environment
from dray.spec.program.code import RemoteCode
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.node_needs import (
    BuildState,
    JobNeed,
    NodeEnvironment,
    NodeNeeds,
)
from service.cluster.port import Cluster, ClusterUnavailable
from service.config import node_policies
from service.config.settings import Settings
from service.db.notifications import QUEUE, Signals

logger = logging.getLogger(__name__)

BELIEVED_S = 30.0
"""Seconds for which a response is valid before the node is asked again. This time is much shorter
than the time for which a node keeps an unused environment."""
FORGOTTEN_S = 60.0
"""Once no job has been about to start on a node for this many seconds, the node is asked less
often."""
SELDOM_S = 15.0
"""Seconds between two requests to a node on which no job is about to start. The requests show the
node that a queued job still needs the preparation, so this interval is much shorter than
`shared_work.WANTED_S`."""
BUILDING_S = 0.1
"""Seconds between the response of a node that is building an environment and the next request to
the node."""
MAX_MESSAGE = 2000
"""Maximum length of an installer's message, and of the reason why a job waits."""
ASK_AGAIN_S = 1.0
"""Seconds to wait before asking a node again if the node, its package index or its repository did
not respond."""


IS_PREPARED: Mapping[JobNeed, str] = {
    JobNeed.ENVIRONMENT: "its environment is being prepared",
    JobNeed.CODE: "its code is being fetched",
}


def needs_of(document: Mapping[str, Any], owner: str, settings: Settings) -> NodeNeeds | None:
    """Return the environment and code that nodes must prepare for a job, or None if there is
    nothing to prepare."""
    script = document.get("script") or {}
    try:
        environment = _environment_of(document.get("environment"))
        source = script.get("code")
        code = None
        if isinstance(source, Mapping):
            code = node_policies.code_of(RemoteCode.model_validate(source), settings)
    except ValidationError:
        return None  # the document is from another release, and the claim will refuse it
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
    # Omit the job's environment variables, which the node's agent doesn't need.
    return environment.model_dump(mode="json", exclude={"env"})


def _digest_of(needs: NodeNeeds) -> str:
    text = json.dumps(asdict(needs), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class _Question:
    """A request to a node, repeated until the response is final."""

    needs: NodeNeeds
    node_id: str
    wanted_at: float
    """The time at which a job last needed the response, by the event loop's clock."""
    jobs: set[str]
    """Jobs that needed the response at least once and are still waiting."""
    answer: NodeEnvironment | None = None
    answered_at: float = 0.0
    silent: str = "has not answered yet"
    task: asyncio.Task[None] | None = None
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a job needs the response."""

    @property
    def is_settled(self) -> bool:
        return self.answer is not None and self.answer.state in (
            BuildState.READY,
            BuildState.FAILED,
        )

    def is_over(self, now: float) -> bool:
        """Whether the request must be sent again because the response is old or the task has
        ended."""
        if self.is_settled:
            return now - self.answered_at > BELIEVED_S
        return self.task is not None and self.task.done()

    @property
    def need(self) -> JobNeed:
        """The item that the node is preparing, according to its last response; before any response,
        the first item that the job needs."""
        if self.answer is not None:
            return self.answer.need
        return JobNeed.CODE if self.needs.environment is None else JobNeed.ENVIRONMENT

    @property
    def sentence(self) -> str:
        """A description of the node's progress."""
        if self.answer is None:
            return self.silent
        if self.answer.state is BuildState.UNREACHABLE:
            return f"tries again: {self.answer.message}"
        return self.answer.message


@dataclass(frozen=True)
class Readiness:
    """Whether the nodes of a plan are ready for a job."""

    environments: tuple[NodeEnvironment, ...]
    """The environments on the nodes that are ready; empty if the job has no environment."""
    failure: NodeEnvironment | None
    waiting: str | None
    """The reason why the job waits; None if all nodes are ready or a node has failed."""
    is_long: bool
    """Whether a node has reported that its preparation is not complete."""

    @property
    def is_ready(self) -> bool:
        return self.waiting is None and self.failure is None


def _storable(answer: NodeEnvironment) -> NodeEnvironment:
    """Return the response with strings cleaned for storing in a database. The strings can contain
    messages from indexes, repositories and installers."""
    return replace(
        answer,
        message=clean(answer.message)[:MAX_MESSAGE],
        packages=tuple(map(clean, answer.packages)),
        replaced=tuple(map(clean, answer.replaced)),
        log=clean(answer.log),
    )


class Preparations:
    """Asks nodes to prepare the environments and code of jobs, and keeps their responses. Each
    instance must be used in a single event loop."""

    def __init__(self, cluster: Cluster, signals: Signals) -> None:
        self._cluster = cluster
        self._signals = signals
        self._questions: dict[tuple[str, str], _Question] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks of requests that no job needs any more, kept until their nodes have been
        notified."""

    def check(
        self, job_id: str, needs: NodeNeeds, node_ids: Sequence[str], names: Mapping[str, str]
    ) -> Readiness:
        """Return whether these nodes are ready for a job. Start to ask the nodes whose response is
        unknown.

        `names` contains the hostname of each node.
        """
        found = {node_id: self._question(job_id, needs, node_id) for node_id in node_ids}
        answers = [q.answer for q in found.values() if q.is_settled and q.answer is not None]
        failure = next((a for a in answers if a.state is BuildState.FAILED), None)
        missing = {node: question for node, question in found.items() if not question.is_settled}
        waiting = None
        if missing and failure is None:
            why = "; ".join(f"{names.get(n, n)} {q.sentence}" for n, q in missing.items())
            needs_now = {question.need for question in missing.values()}
            need = min(needs_now, key=list(IS_PREPARED).index)
            waiting = f"{IS_PREPARED[need]}: {why}"[:MAX_MESSAGE]
        ready = tuple(
            a for a in answers if a.state is BuildState.READY and a.need is JobNeed.ENVIRONMENT
        )
        is_long = any(question.answer is not None for question in missing.values())
        return Readiness(ready, failure, waiting, is_long)

    def keep(self, job_ids: Set[str]) -> None:
        """Let nodes stop preparations that none of these jobs needs. `job_ids` must contain all
        waiting jobs."""
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
            pass  # the node itself stops a preparation if it is no longer asked about it
        except Exception:
            logger.exception("a node could not be notified that a preparation is no longer needed")

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
        """Forget a failure after it has made a job fail, so that the next job retries the
        preparation."""
        digest = _digest_of(needs)
        for node_id in node_ids:
            question = self._questions.get((digest, node_id))
            if question is not None and question.is_settled:
                del self._questions[(digest, node_id)]

    async def _ask(self, question: _Question) -> None:
        """Ask until the node is ready or has failed, or until no job needs the response. If no job
        needs the response, the node is notified only after its last response, so that no request
        can arrive after the notification."""
        loop = asyncio.get_running_loop()
        while question.jobs:
            try:
                answer = await self._cluster.prepare(question.node_id, question.needs)
                question.answer = _storable(answer)
            except ClusterUnavailable as error:
                question.answer, question.silent = None, clean(f"does not answer: {error}")
            except Exception:
                logger.exception("a node could not be asked to prepare for a job")
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
