"""The speed of this cluster's workers, measured from the steps of succeeded jobs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session

from dray.spec import JobSpec
from ray_workers.shared.contracts import TOKENS
from service.db.repositories import jobs as repository
from service.planning.model.cost import Machine, step_time
from service.planning.model.memory import pieces_of, rows_of
from service.planning.model.shapes import Shapes, shapes_of
from service.planning.model.unknown import Unknown
from service.telemetry import metric_reader

STEP_TIME = "perf/step_time_s"
LOOKED_AT, COUNTED = 50, 5
"""Number of the latest successful jobs to examine, and number of jobs whose steps are read."""
LEAST_STEPS = 20
"""Shorter jobs are ignored, because half of their steps would be warm-up."""
SAMPLED_STEPS = 500
COMPARABLE = 0.1
"""Minimum number of operations of a measured step, as a fraction of the planned step's operations.
A much smaller step is mostly launch overhead, which would make an H100 seem hundreds of times
slower than it is."""


ConfigOf = Callable[[JobSpec], Mapping[str, Any] | None]
"""Returns the `config.json` of a job's base; None if it has no base, or if it can't be read."""


def calibrated(
    session: Session,
    machine: Machine,
    spec: JobSpec,
    shapes: Shapes,
    accelerator: str | None,
    config_of: ConfigOf,
) -> Machine:
    """Return the machine with its speed set to that of earlier jobs on workers of the same kind.

    The machine is returned unchanged if there was no such job. The highest speed is used, because a
    small model does not use a worker's full speed.
    """
    enough = COMPARABLE * _operations(spec, shapes, machine)
    speeds: list[float] = []
    for job_id, document in repository.newest_succeeded(session, LOOKED_AT):
        ran = _of_a_kind(document, spec, accelerator)
        if ran is None:
            continue
        speed = _speed(session, job_id, ran, machine, enough, config_of)
        if speed is not None:
            speeds.append(speed)
        if len(speeds) == COUNTED:
            break
    if not speeds:
        return machine
    jobs = "the last job" if len(speeds) == 1 else f"the last {len(speeds)} jobs"
    source = f"speed measured in {jobs} on workers of this kind; other values: {machine.source}"
    return replace(machine, flops_per_s=max(speeds), source=source)


def _of_a_kind(
    document: dict[str, object], spec: JobSpec, accelerator: str | None
) -> JobSpec | None:
    """Return the parsed document; None if the job ran on workers of a different kind."""
    try:
        ran = JobSpec.model_validate(document)
    except ValueError:
        return None  # written by another version
    on_gpu = spec.resources.gpus_per_worker > 0
    alike = spec.resources.gpus_per_worker == ran.resources.gpus_per_worker
    if on_gpu and accelerator is not None:
        alike = alike and ran.resources.accelerator in (None, accelerator)
    return ran if alike else None


def _operations(spec: JobSpec, shapes: Shapes, machine: Machine) -> float:
    """Return the number of operations of one worker in a step."""
    return step_time(spec, shapes, replace(machine, flops_per_s=1.0)).compute_s


def _speed(
    session: Session,
    job_id: str,
    ran: JobSpec,
    machine: Machine,
    enough: float,
    config_of: ConfigOf,
) -> float | None:
    """Return the `flops_per_s` of the job's workers, if it can be derived from the job's steps.
    `enough` is the minimum number of operations per step for an exact speed. A smaller step gives a
    lower bound."""
    series = metric_reader.read(
        session, job_id, keys=[STEP_TIME, TOKENS], rank=0, after_step=-1, max_points=SAMPLED_STEPS
    )
    seconds: Sequence[float] = series[STEP_TIME][1] if STEP_TIME in series else ()
    if len(seconds) < LEAST_STEPS:
        return None
    try:
        shapes = shapes_of(ran, config=config_of(ran))
    except Unknown:
        return None
    if ran.method is not None:
        if TOKENS not in series:
            return None  # the rows of its steps could have any length
        pieces = pieces_of(ran)
        num_rows = pieces.size * pieces.count * rows_of(ran.method)
        length = round(statistics.median(series[TOKENS][1]) / num_rows)
        shapes = replace(shapes, length=max(1, length))
    expected = step_time(ran, shapes, replace(machine, flops_per_s=1.0))
    ideal_s = expected.compute_s + expected.idle_s  # on a machine with one operation per second
    step_s = statistics.median(seconds)
    if expected.send_s < step_s / 2 and expected.compute_s >= enough:
        return ideal_s / (step_s - expected.send_s)
    # Send and launch times are not measured. If these times dominate the step, the speed can't be
    # derived from the remaining time, and the total step time gives only a lower bound.
    at_least = ideal_s / step_s
    return at_least if at_least > machine.flops_per_s else None
