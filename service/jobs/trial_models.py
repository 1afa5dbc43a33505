"""Checks of the bases and tokenizers that the trials of a sweep name, as at the submission of a
single job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from dray.spec import JobSpec
from ray_workers.shared.node_needs import DataPolicy
from service.domain.errors import DomainError
from service.jobs import base_models, data_policy
from service.planning.service import Plans
from service.sweeps.submitting import Trials

FIELDS: Final = ("model.base", "model.tokenizer")


async def refuse_unfit(
    spec: JobSpec,
    trials: Trials | None,
    plans: Plans,
    policy_of: Callable[[JobSpec], DataPolicy],
) -> None:
    """Raise the error of the first base or tokenizer that a trial can't use: DataSourceForbidden,
    InvalidDocument or OutOfMemory."""
    if trials is None:
        return

    async def check(name: str, trial: JobSpec) -> None:
        policy = policy_of(trial)
        try:
            await data_policy.refuse_forbidden(trial, policy)
            await base_models.refuse_unfit(trial, policy)
            if (refusal := (await plans.resolve(trial)).refusal) is not None:
                raise refusal
        except DomainError as error:
            value = getattr(trial.model, name.removeprefix("model."))
            raise type(error)(
                f"with {name} {value}: {error.message}",
                pointer=f"/sweep/parameters/{name}",
                hint=error.hint,
            ) from None

    checks = [check(name, trial) for name, trial in _varied(spec, trials)]
    # Together, because looking up the name of a host can take seconds.
    for found in await asyncio.gather(*checks, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


def _varied(spec: JobSpec, trials: Trials) -> Iterator[tuple[str, JobSpec]]:
    """Yield (field, document of a trial) for each value of FIELDS that occurs in a trial."""
    for name in FIELDS:
        if name not in trials.sweep.parameters:
            continue
        if trials.documents is not None:
            field = name.removeprefix("model.")
            of_value = {(one["model"] or {}).get(field): one for one in trials.documents}
            yield from ((name, JobSpec.model_validate(one)) for one in of_value.values())
            continue
        for value in trials.sweep.parameters[name].choices or ():
            try:
                trial = JobSpec.model_validate(spec.of_trial({name: value}))
            except ValueError:
                continue  # an invalid trial, which is not started
            yield name, trial
