"""The speed of workers here, from the steps of the jobs that ended well."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from dray.spec import JobSpec
from service.db.repositories import jobs as repository
from service.planning.model.cost import Machine, step_time
from service.planning.model.shapes import Shapes, Unknown, shapes_of
from service.telemetry import metric_reader

STEP_TIME = "perf/step_time_s"
LOOKED_AT, COUNTED = 50, 5
"""How many of the newest jobs that succeeded are considered, and the steps of how many are read."""
LEAST_STEPS = 20
"""A shorter job says nothing: half of its steps would be its warming up."""
MOST_POINTS = 500
COMPARABLE = 0.1
"""Part of the operations of the planned step that a step must have had. The time of a much smaller
one is mostly that of launching it: an H100 is told to be hundreds of times slower than it is."""


def calibrated(
    session: Session, machine: Machine, spec: JobSpec, accelerator: str | None
) -> Machine:
    """The machine with the speed that workers like the job's have shown; unchanged where no such
    job has run yet, and where the shapes of the planned job are not known.

    A small model doesn't use all of a worker's speed, so the highest that any of those jobs has
    reached counts.
    """
    try:
        enough = COMPARABLE * _operations(spec, shapes_of(spec), machine)
    except Unknown:
        return machine
    speeds: list[float] = []
    for job_id, document in repository.newest_succeeded(session, LOOKED_AT):
        ran = _of_a_kind(document, spec, accelerator)
        speed = None if ran is None else _speed(session, job_id, ran, machine, enough)
        if speed is not None:
            speeds.append(speed)
        if len(speeds) == COUNTED:
            break
    if not speeds:
        return machine
    jobs = "the last job" if len(speeds) == 1 else f"the last {len(speeds)} jobs"
    source = f"speed as {jobs} on such workers reached it; the rest: {machine.source}"
    return replace(machine, flops_per_s=max(speeds), source=source)


def _of_a_kind(
    document: dict[str, object], spec: JobSpec, accelerator: str | None
) -> JobSpec | None:
    """The document of a job that ran on workers of the same kind."""
    try:
        ran = JobSpec.model_validate(document)
    except ValueError:
        return None  # of another version
    on_gpu = spec.resources.gpus_per_worker > 0
    alike = spec.resources.gpus_per_worker == ran.resources.gpus_per_worker
    if on_gpu and accelerator is not None:
        alike = alike and ran.resources.accelerator in (None, accelerator)
    return ran if alike else None


def _operations(spec: JobSpec, shapes: Shapes, machine: Machine) -> float:
    """Of a worker in a step."""
    return step_time(spec, shapes, replace(machine, flops_per_s=1.0)).compute_s


def _speed(
    session: Session, job_id: str, ran: JobSpec, machine: Machine, enough: float
) -> float | None:
    """Floating point operations per second that the `machine.flops_per_s` of its workers were.
    enough: of how many operations a step says how fast they are, and not only that they are no
    slower."""
    try:
        shapes = shapes_of(ran)
    except Unknown:
        return None
    series = metric_reader.read(
        session, job_id, keys=[STEP_TIME], rank=0, after_step=-1, max_points=MOST_POINTS
    )
    seconds: Sequence[float] = series[STEP_TIME][1] if STEP_TIME in series else ()
    if len(seconds) < LEAST_STEPS:
        return None
    expected = step_time(ran, shapes, replace(machine, flops_per_s=1.0))
    ideal_s = expected.compute_s + expected.idle_s  # of a machine with one operation a second
    step_s = statistics.median(seconds)
    if expected.send_s < step_s / 2 and expected.compute_s >= enough:
        return ideal_s / (step_s - expected.send_s)
    # The times of sending and of launching are not measured: where they would be most of the step,
    # the rest says nothing. That computing took no longer than the whole step may still be news.
    at_least = ideal_s / step_s
    return at_least if at_least > machine.flops_per_s else None
