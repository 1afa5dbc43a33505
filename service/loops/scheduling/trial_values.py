"""Values for the trials of sweeps whose sampler is asked when a trial starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.spec import Sweep
from dray.spec.sweep import with_values
from dray.validation import Fault, check
from dray.views import JobState
from service.db.notifications import QUEUE, Signals
from service.db.repositories import sweeps as repository
from service.domain.scheduling import policy
from service.domain.states import STOPPED_EARLY
from service.domain.text import clean
from service.lifecycle import transitions
from service.loops.shared.fencing import LoopDatabase
from service.sweeps import optuna_sampler
from service.sweeps.optuna_sampler import EarlierTrial, Told

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""After a sampler failed."""
MAX_MESSAGE = 2000
UNAVAILABLE = "sampler_unavailable"


@dataclass(frozen=True)
class _SamplerQuestion:
    sweep: Sweep
    base: Mapping[str, Any]
    index: int
    earlier: Sequence[EarlierTrial]


class TrialValues:
    """Asks the samplers beside the scheduler's rounds, one question after the other: a sampler may
    take a second, and must see the trials that were asked for before."""

    def __init__(self, database: LoopDatabase, signals: Signals) -> None:
        self._database = database
        self._signals = signals
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self.failed: dict[str, str] = {}
        """Why a trial has no values, by job, until its sampler is asked again."""

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    def in_queue(self, queue: Sequence[policy.WaitingJob]) -> tuple[policy.WaitingJob, ...]:
        """Trials whose sampler has failed take no slots until it is asked again."""
        if not self.failed:
            return tuple(queue)
        return tuple(
            replace(job, preparing=self.failed[job.job_id]) if job.job_id in self.failed else job
            for job in queue
        )

    def reason(self, decision: policy.Decision) -> policy.Decision:
        """The same, with the reason of such a trial."""
        said = self.failed.get(decision.job_id)
        if said is None or not isinstance(decision, policy.Wait):
            return decision
        return replace(decision, reason=policy.Reason(UNAVAILABLE, said))

    async def have(self, job_ids: Sequence[str]) -> set[str]:
        """Those of these jobs that have all values that they need. The samplers are asked for the
        others, and the scheduler is woken when they have answered."""
        if not job_ids:
            return set()
        lacking = await self._database.read(lambda s, _: repository.without_values(s, job_ids))
        for job_id in job_ids:
            if job_id in lacking and job_id not in self._asking:
                self._asking[job_id] = asyncio.create_task(self._ask(job_id))
        return set(job_ids) - lacking

    async def _ask(self, job_id: str) -> None:
        try:
            async with self._one_at_a_time:
                await self._answer(job_id)
        except Exception as error:  # also where this service lacks Optuna: another may have it
            logger.warning("no values for the trial %s: %r", job_id, error)
            said = clean(f"its sampler gave no values: {error}")[:MAX_MESSAGE]
            await self._database.write(lambda s, at: _note(s, job_id, said, at))
            self.failed[job_id] = said
            await asyncio.sleep(ASK_AGAIN_S)
        finally:
            self.failed.pop(job_id, None)
            del self._asking[job_id]
        self._signals.publish(QUEUE)

    async def _answer(self, job_id: str) -> None:
        """Give the trial its values, unless it has changed meanwhile."""
        question = await self._database.read(lambda s, _: _question(s, job_id))
        if question is None:
            return
        values = await asyncio.to_thread(
            optuna_sampler.ask, question.sweep, question.index, question.earlier
        )
        document = _document(question.base, values)
        await self._database.write(lambda s, _: repository.set_values(s, job_id, values, document))


def _question(session: Session, job_id: str) -> _SamplerQuestion | None:
    """None of a trial that has its values by now, or is gone."""
    trial = repository.trial(session, job_id)
    row = None if trial is None else repository.get(session, trial.array_id)
    if trial is None or row is None or trial.parameters is not None:
        return None
    sweep = Sweep.model_validate(row.sweep)
    earlier = [_earlier(one) for one in repository.told(session, trial.array_id)]
    return _SamplerQuestion(sweep, row.base, trial.array_index, earlier)


def _earlier(row: repository.ToldRow) -> EarlierTrial:
    return EarlierTrial(row.parameters, _told(row.state, row.reason_code), row.value, row.last_step)


def _told(state: JobState, reason: str) -> Told:
    if reason == STOPPED_EARLY:
        return Told.STOPPED_EARLY
    if state is JobState.SUCCEEDED:
        return Told.ENDED
    return Told.FAILED if state.is_terminal else Told.RUNNING


def _document(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The trial's document. One that is refused is stored as it is: the claim fails the trial for
    it, and says why."""
    document = with_values(base, values)
    try:
        return check(document).model_dump(mode="json")
    except Fault:
        return document


def _note(session: Session, job_id: str, said: str, now: datetime) -> None:
    reason = policy.Reason(UNAVAILABLE, said)
    transitions.note_waiting(session, [policy.Wait(job_id, reason, 1)], now)
