"""Gets the values of trials from samplers such as Optuna, which are called when a trial is about to
start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy.orm import Session

from dray.input.validation import Fault, check
from dray.spec import Sweep
from dray.spec.trial_values import with_values
from dray.views import JobState
from ray_workers.shared.frame_fields import clean
from service.db.notifications import QUEUE, Signals
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import document_values
from service.db.repositories.submission import sweeps as repository
from service.domain.scheduling import policy
from service.domain.states import STOPPED_EARLY
from service.domain.tracking.document_values import of_trial
from service.lifecycle import transitions
from service.loops.scheduling.stages import SchedulerRound, Stage, held_back
from service.loops.shared.fencing import LoopDatabase
from service.sweeps import optuna_sampler
from service.sweeps.optuna_sampler import EarlierTrial, TrialOutcome

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""Seconds after which a sampler that failed is called again."""
PATIENCE_S = 2.0
"""Maximum time in seconds to keep slots free while waiting for a sampler to return the values. Most
samplers take a fraction of a second."""
NUM_THREADS = 4
MAX_MESSAGE = 2000
UNAVAILABLE = "sampler_unavailable"


@dataclass(frozen=True)
class _SamplerQuestion:
    sweep: Sweep
    base: Mapping[str, Any]
    index: int
    earlier: Sequence[EarlierTrial]


class TrialValues(Stage):
    """Calls the samplers concurrently with the scheduler's rounds. The sampler of a sweep handles
    one call at a time, because a call can take a second and its result depends on earlier trials.

    The slots of a trial are kept free for `PATIENCE_S` until the first result arrives. If the
    sampler takes longer or fails, the sweep's trials without values take no slots until the sampler
    has returned values.
    """

    def __init__(self, database: LoopDatabase, signals: Signals) -> None:
        self._database = database
        self._signals = signals
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks, by sweep."""
        # Use a separate thread pool, so that unresponsive samplers can't use up the threads of the
        # whole process.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dray-samplers")
        self._late: dict[str, str] = {}
        """For each sweep, the reason why its sampler has no values."""
        self._passed_over: dict[str, str] = {}
        """For each trial's job, the reason why it takes no slots in this round."""

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def before(self, seen: SchedulerRound) -> None:
        """Prevent trials whose sampler is late or has failed from taking slots."""
        late, lacking = dict(self._late), {}
        if late:
            lacking = await self._database.read(lambda s, _: repository.without_values_of(s, late))
        self._passed_over = {job_id: late[of] for job_id, of in lacking.items()}
        seen.snapshot = held_back(seen.snapshot, self._passed_over)

    async def after(self, seen: SchedulerRound) -> None:
        if self._passed_over:
            seen.decisions = seen.planned = [self._reason(each) for each in seen.planned]

    def _reason(self, decision: policy.Decision) -> policy.Decision:
        """Return the decision, with the reason replaced if the plan passes over a waiting trial."""
        why = self._passed_over.get(decision.job_id)
        if why is None or not isinstance(decision, policy.Wait):
            return decision
        return replace(decision, reason=policy.Reason(UNAVAILABLE, why))

    def is_asked_for(self, job_id: str) -> bool:
        """Whether the trial's sampler has been called but has not returned yet."""
        return job_id in self._asking

    async def ask(self, job_ids: Iterable[str]) -> None:
        """Call the samplers of these jobs, which could not be claimed because they lack values.

        The results wake the scheduler. Never raises an exception, because other jobs are about to
        be launched. If the sampler of a job is not called now, it will be called after the job's
        next failed claim.
        """
        asked = list(job_ids)
        try:
            lacking = await self._database.read(lambda s, _: repository.without_values(s, asked))
        except Exception:
            logger.exception("the trials that lack values could not be read")
            return
        for job_id in asked:
            if job_id in lacking and job_id not in self._asking:
                asking = self._ask(job_id, lacking[job_id])
                self._asking[job_id] = asyncio.create_task(asking)

    async def _ask(self, job_id: str, sweep_id: str) -> None:
        """Call the sampler until the trial needs no more values."""
        lock = self._locks.setdefault(sweep_id, asyncio.Lock())
        try:
            while True:
                async with lock:
                    if await self._has_answered(job_id, sweep_id):
                        break
                await asyncio.sleep(ASK_AGAIN_S)
        finally:
            self._late.pop(sweep_id, None)
            del self._asking[job_id]
            self._signals.publish(QUEUE)

    async def _has_answered(self, job_id: str, sweep_id: str) -> bool:
        answering = asyncio.create_task(self._answer(job_id))
        try:
            done, _ = await asyncio.wait({answering}, timeout=PATIENCE_S)
            if not done:
                await self._pass_over(
                    job_id, sweep_id, "the sweep's sampler has not returned values yet"
                )
            await answering
        except Exception as error:
            # For example, Optuna is not installed in this service, but another service might have
            # it.
            logger.warning("no values for the trial %s: %r", job_id, error)
            why = clean(f"the sweep's sampler returned no values: {error}")[:MAX_MESSAGE]
            await self._pass_over(job_id, sweep_id, why)
            return False
        finally:
            answering.cancel()
        return True

    async def _pass_over(self, job_id: str, sweep_id: str, why: str) -> None:
        """Let other jobs use the slots until the sampler has returned."""
        self._late[sweep_id] = why
        await self._database.write(lambda s, at: _note(s, job_id, why, at))
        self._signals.publish(QUEUE)

    async def _answer(self, job_id: str) -> None:
        """Give the trial its values, unless it has changed in the meantime."""
        question = await self._database.read(lambda s, _: _question(s, job_id))
        if question is None:
            return
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(
            self._threads, optuna_sampler.ask, question.sweep, question.index, question.earlier
        )
        document = _document(question.base, values)
        await self._database.write(lambda s, _: _set_values(s, job_id, values, document))


def _question(session: Session, job_id: str) -> _SamplerQuestion | None:
    """Return the input of the sampler for a trial; None if the trial already has its values or no
    longer waits."""
    trial = repository.trial(session, job_id)
    row = None if trial is None else repository.get(session, trial.array_id)
    if trial is None or row is None or trial.parameters is not None:
        return None
    if jobs_repository.state_of(session, job_id) is not JobState.QUEUED:
        return None
    sweep = Sweep.model_validate(row.sweep)
    earlier = [_earlier(one) for one in repository.earlier_trials(session, trial.array_id)]
    return _SamplerQuestion(sweep, row.base, trial.array_index, earlier)


def _set_values(
    session: Session, job_id: str, values: Mapping[str, Any], document: Mapping[str, Any]
) -> None:
    """Give a trial its values, unless it has changed in the meantime."""
    trial = repository.trial(session, job_id)
    sweep = None if trial is None else repository.get(session, trial.array_id)
    if sweep is not None and repository.set_values(session, job_id, values, document):
        own = of_trial(document, sweep.base, sweep.num_trials)
        document_values.replace(session, job_id, sweep.array_id, own)


def _earlier(row: repository.EarlierTrialRow) -> EarlierTrial:
    outcome = _outcome(row.state, row.reason_code)
    return EarlierTrial(row.parameters, outcome, row.value, row.last_step)


def _outcome(state: JobState, reason: str) -> TrialOutcome:
    if reason == STOPPED_EARLY:
        return TrialOutcome.STOPPED_EARLY
    if state is JobState.SUCCEEDED:
        return TrialOutcome.ENDED
    return TrialOutcome.FAILED if state.is_terminal else TrialOutcome.RUNNING


def _document(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trial's document. An invalid document is stored unchanged; the claim then fails
    the trial with the error as its reason."""
    document = with_values(base, values)
    try:
        return check(document).model_dump(mode="json")
    except Fault:
        return document


def _note(session: Session, job_id: str, why: str, now: datetime) -> None:
    reason = policy.Reason(UNAVAILABLE, why)
    transitions.note_waiting(session, [policy.Wait(job_id, reason, 1)], now)
