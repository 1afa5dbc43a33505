"""Submission of a sweep. Every trial's document is checked before anything is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from dray.input.validation import Fault, check
from dray.spec import JobSpec, Sweep
from service.db.models import SweepRow
from service.db.repositories.submission import sweeps as repository
from service.domain.errors import InvalidTrial, SamplerUnavailable
from service.domain.sweeps.sampling import values_of
from service.sweeps import optuna_sampler

NUM_TRIED = 16
"""Number of random trials whose documents are checked if the sampler chooses the parameters only
when trials start."""


@dataclass(frozen=True)
class Trials:
    """The trials of a sweep, in the order of their indices."""

    sweep: Sweep
    base: Mapping[str, Any]
    """The user's document without `sweep`."""
    values: Sequence[Mapping[str, Any]] | None
    """The parameters of each trial; None if the sampler chooses them when a trial starts."""
    documents: Sequence[dict[str, Any]] | None
    """The document of each trial; None if the document is `base` until the sampler chooses the
    parameters."""

    def document(self, index: int) -> dict[str, Any]:
        return dict(self.base) if self.documents is None else self.documents[index]


async def trials_of(spec: JobSpec) -> Trials | None:
    """Return the trials of a document; None if it has no `sweep`. Raises InvalidTrial if a trial's
    document is invalid, and SamplerUnavailable if the sampler is not installed."""
    sweep = spec.sweep
    if sweep is None:
        return None
    if sweep.sampler == "optuna":
        refuse_without_optuna()
        await asyncio.to_thread(_refuse_hopeless, spec, sweep)
        return Trials(sweep, spec.of_trial({}), None, None)
    return await asyncio.to_thread(_all, spec, sweep)  # checking 10,000 documents takes seconds


def refuse_without_optuna() -> None:
    if not optuna_sampler.is_installed():
        raise SamplerUnavailable(
            "Optuna is not installed on this server",
            pointer="/sweep/sampler",
            hint="use random or grid, or ask the operator to run pip install 'dray[optuna]'",
        )


def _all(spec: JobSpec, sweep: Sweep) -> Trials:
    values = [values_of(sweep, index) for index in range(sweep.num_trials)]
    documents = [_document(spec, one, index) for index, one in enumerate(values)]
    return Trials(sweep, spec.of_trial({}), values, documents)


def _refuse_hopeless(spec: JobSpec, sweep: Sweep) -> None:
    """Raise InvalidTrial if all NUM_TRIED random trials are invalid."""
    refused = None
    for index in range(NUM_TRIED):
        try:
            _document(spec, values_of(sweep, index), index)
        except InvalidTrial as error:
            refused = refused or error
        else:
            return
    if refused is not None:
        raise refused


def _document(spec: JobSpec, values: Mapping[str, Any], index: int) -> dict[str, Any]:
    try:
        document: dict[str, Any] = check(spec.of_trial(values)).model_dump(mode="json")
    except Fault as fault:
        drawn = ", ".join(f"{name}={value}" for name, value in values.items())
        raise InvalidTrial(
            f"trial {index} ({drawn}) is not a valid job: {fault.pointer or ''} {fault.detail}",
            pointer="/sweep/parameters",
            hint=fault.hint or "remove the values that can't be combined",
        ) from None
    return document


def with_each_precision(spec: JobSpec) -> Iterator[JobSpec]:
    """Yield the document itself, and the document with each precision that its sweep can choose."""
    yield spec
    drawn = spec.sweep and spec.sweep.parameters.get("train.precision")
    for precision in (drawn.choices or ()) if drawn else ():
        yield JobSpec.model_validate(spec.of_trial({"train.precision": precision}))


def insert(session: Session, array_id: str, trials: Trials, job_ids: Sequence[str]) -> None:
    """Store the sweep of an array whose jobs are already stored. `job_ids` is in the order of the
    indices."""
    row = SweepRow(
        array_id=array_id,
        sweep=trials.sweep.model_dump(mode="json"),
        base=dict(trials.base),
        num_trials=len(job_ids),
    )
    rows = [
        {
            "job_id": job_id,
            "array_id": array_id,
            "array_index": index,
            "parameters": None if trials.values is None else dict(trials.values[index]),
        }
        for index, job_id in enumerate(job_ids)
    ]
    repository.insert_sweep(session, row, rows)
