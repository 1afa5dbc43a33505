"""How many workers each elastic job gets, by what more of them would gain: pure rules.

A job reports how long its steps take with the workers that it has. A model of a step's time with
few coefficients is fitted to these reports, and tells how much faster the job would be with others.
The workers of the cluster go, one size after the other, to the job that gains most by them: its
speed relative to that with its least size, weighed by the time that it has left, so that the mean
time until jobs end is short. At weights of equal size each job would get a fair part (Pollux, Qiao
et al., OSDI 2021); at weights of one over the time left short jobs would come strictly first. The
square root lies between them, as the optimum does for speeds that grow with a power of the size
(heSRPT, Berg et al. 2020, https://arxiv.org/abs/1903.09346).

A job with a range for its batch (`train.batch_range`) has at each size the batch with which it
makes most progress a second: samples a second, times what a sample is worth in a batch of that
size. With the gradient noise scale p that is p / (p + size), but for a constant (McCandlish et al.
2018, https://arxiv.org/abs/1812.06162).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

EXPLORED = 2
"""Times the largest size that was reported: beyond that nobody knows the job's speed."""
RESTART_S = 30.0
"""In which a job makes no progress when its size changes."""
LASTS_S = 300.0
"""How long a size is expected to last, which must make up for the restart."""
LEFT_POWER = 0.5
"""How the time that a job has left weighs against it: see above."""
UNKNOWN_LEFT_S = 600.0
"""Taken of a job that has not told: it is to tell soon."""
SHORTEST_S = 30.0
"""A job that is about to end has at least so long left."""
NEARLY_NOTHING = 1e-6
CLEARLY_BETTER = 1.05
"""The progress with another batch over that with the one in force, for which it is changed."""
TRIED = 1.15
"""The same for a batch that is larger than all that were reported. Only a report of it tells the
time that each step takes whatever its batch, so it is tried where it loses little."""
PRIOR = 1e-3
"""Weight of the assumption that steps cost only their samples, in squares of relative errors."""


@dataclass(frozen=True)
class ReportedStep:
    """The time of an optimizer step, as a job reported it."""

    num_workers: int
    num_nodes: int
    batch_size: int
    """Over all workers."""
    seconds: float


@dataclass(frozen=True)
class ElasticJob:
    """The sizes that a job may have, and what it has reported."""

    least: int
    most: int
    batch_size: int
    """In force now."""
    micro_batch_size: int
    """Most samples of a worker's forward pass: larger shares are computed in several."""
    step_times: tuple[ReportedStep, ...] = ()
    """Its own, and those of earlier jobs like it."""
    in_place: bool = False
    """Its group grows and shrinks without leaving its slots; only its start costs a restart."""
    steps_left: float | None = None
    """At the batch size in force; None where nobody knows."""
    batch_range: tuple[int, int] | None = None
    """Least and largest batch; None of a job whose batch is fixed. Batches are multiples of the
    least."""
    noise_scale: float | None = None
    """In samples; None while it was not measured."""


@dataclass(frozen=True)
class Sized:
    """An elastic job with its place in one plan."""

    job_id: str
    job: ElasticJob
    held: int
    """Workers that it has; 0 of a job that waits."""
    stays: bool = False
    """It keeps what it has, and may get more."""
    comes_first: bool = False
    """It gets its least size before anybody gets more."""


@functools.lru_cache(maxsize=4096)
def fitted(step_times: tuple[ReportedStep, ...], micro_batch_size: int) -> tuple[float, ...]:
    """The coefficients of a step's time, none of them negative: those of `_terms`.

    Least squares of relative errors. Times that the reports can't tell apart are put down to the
    samples: a job is taken to grow well until it shows that it does not.
    """
    rows = [
        (_terms(each.num_workers, each.num_nodes, each.batch_size, micro_batch_size), each.seconds)
        for each in step_times
    ]
    active = list(range(NUM_TERMS))
    while True:
        solved = _solve(rows, active)
        negative = min(active, key=lambda at: solved[at])
        if solved[negative] >= 0 or len(active) == 1:
            return tuple(max(0.0, each) for each in solved)
        active.remove(negative)


NUM_TERMS = 5


def _terms(num_workers: int, num_nodes: int, batch_size: int, micro: int) -> tuple[float, ...]:
    """Of a step: passes, samples of a worker, an exchange, what it takes longer between nodes, and
    the part of it that grows with the workers."""
    share = batch_size / num_workers
    return (
        float(math.ceil(share / micro)),
        share,
        float(num_workers > 1),
        float(num_nodes > 1),
        float(max(0, num_workers - 2)),
    )


def _solve(rows: Sequence[tuple[tuple[float, ...], float]], active: Sequence[int]) -> list[float]:
    """The least squares of the active terms; the others are 0."""
    scale = [max(terms[at] / seconds for terms, seconds in rows) or 1.0 for at in active]
    size = len(active)
    matrix = [[0.0] * (size + 1) for _ in active]
    for terms, seconds in rows:
        scaled = [terms[at] / seconds / scale[place] for place, at in enumerate(active)]
        for row, one in zip(matrix, scaled, strict=True):
            for place, other in enumerate(scaled):
                row[place] += one * other
            row[size] += one
    for place, at in enumerate(active):
        matrix[place][place] += PRIOR * (1e-3 if at == 1 else 1.0)
    for pivot in range(size):  # the matrix is positive definite
        for below in range(pivot + 1, size):
            factor = matrix[below][pivot] / matrix[pivot][pivot]
            for place in range(pivot, size + 1):
                matrix[below][place] -= factor * matrix[pivot][place]
    solved = [0.0] * NUM_TERMS
    for pivot in reversed(range(size)):
        rest = sum(
            matrix[pivot][place] * solved[active[place]] * scale[place]
            for place in range(pivot + 1, size)
        )
        solved[active[pivot]] = (matrix[pivot][size] - rest) / matrix[pivot][pivot] / scale[pivot]
    return solved


def least_run_s(min_run_s: float, num_left: int) -> float:
    """How long a job holds slots before it leaves them all to others that gain more by them.

    num_left: how often it has left its slots. It keeps its least size for longer each time, so in a
    time t it leaves for others no more than sqrt(2 t / min_run_s) times, whatever the estimates
    say.
    """
    return min_run_s * (1 + num_left)


def step_s(
    job: ElasticJob, num_workers: int, per_node: int, batch_size: int | None = None
) -> float:
    """Seconds of a step with so many workers. per_node: workers that a node carries. batch_size:
    None for the one in force."""
    coefficients = fitted(job.step_times, job.micro_batch_size)
    num_nodes = math.ceil(num_workers / per_node)
    terms = _terms(num_workers, num_nodes, batch_size or job.batch_size, job.micro_batch_size)
    return sum(each * term for each, term in zip(coefficients, terms, strict=True))


def best_batch(job: ElasticJob, num_workers: int, per_node: int) -> int:
    """The batch with which the job makes most progress on so many workers, of the one in force, its
    double and its half: the step times of others are not known well."""
    now = job.batch_size
    if job.batch_range is None or job.noise_scale is None or not job.step_times:
        return now
    least, most = job.batch_range
    known = max([each.batch_size for each in job.step_times])

    def cost(size: int) -> float:
        advantage = TRIED if size > known else CLEARLY_BETTER if size == now else 1.0
        return _step_cost(job, num_workers, per_node, size) / advantage

    return min((now, min(2 * now, most), max(now // 2 // least * least, least)), key=cost)


def _step_cost(job: ElasticJob, num_workers: int, per_node: int, batch: int) -> float:
    """Seconds for as much progress as a step with the batch in force makes."""
    seconds, now = step_s(job, num_workers, per_node, batch), job.batch_size
    if batch == now or job.noise_scale is None:
        return seconds
    gain = batch / now * (job.noise_scale + now) / (job.noise_scale + batch)
    return seconds / gain


def _least_cost(job: ElasticJob, num_workers: int, per_node: int) -> float:
    """The same with the batch that is chosen for so many workers."""
    chosen = best_batch(job, num_workers, per_node)
    return _step_cost(job, num_workers, per_node, chosen)


def sizes_of(job: ElasticJob, per_node: int) -> list[int]:
    """The sizes that are weighed: powers of two within a node, and then whole nodes."""
    most = max(job.least, min(job.most, job.batch_size))
    if not job.in_place:  # to try a size costs a restart
        known = max((each.num_workers for each in job.step_times), default=0)
        most = max(job.least, min(most, EXPLORED * known))
    sizes = {job.least, most}
    size = 1
    while size < min(per_node, most):
        sizes.add(size)
        size *= 2
    whole = max(1, most // per_node)
    stride = 1
    number = 1
    while number <= whole:
        sizes.add(number * per_node)
        number += stride
        stride = max(1, number // 4)  # a larger job notices less of a node
    return sorted(size for size in sizes if job.least <= size <= most)


def worths(sized: Sized, per_node: int) -> dict[int, float]:
    """The worth of each size, and of having none. The size that the job has is among them."""
    job, held = sized.job, sized.held
    sizes = sizes_of(job, per_node)
    if held and held not in sizes:
        sizes = sorted({*sizes, held})
    if not job.step_times:
        weight = UNKNOWN_LEFT_S**-LEFT_POWER
        return {0: 0.0} | {size: weight * size / job.least for size in sizes}
    least_s = _least_cost(job, job.least, per_node)
    left_s = UNKNOWN_LEFT_S if job.steps_left is None else job.steps_left * least_s
    left_s = max(left_s, SHORTEST_S)
    weight = left_s**-LEFT_POWER
    worth = {0: 0.0}
    for size in sizes:
        speed = least_s / _least_cost(job, size, per_node)
        if size != held and not (held and job.in_place):
            speed *= max(0.05, 1 - RESTART_S / min(LASTS_S, left_s / speed + RESTART_S))
        worth[size] = weight * speed
    if job.in_place:  # free slots are used, whatever the gain
        highest = 0.0
        for size in sizes:
            worth[size] = highest = max(worth[size], highest * (1 + NEARLY_NOTHING))
    return worth


def sizes(jobs: Sequence[Sized], capacity: int, per_node: int) -> dict[str, int]:
    """Workers of each job, of `capacity` in all: 0 for a job that gets none now."""
    worth = {each.job_id: worths(each, per_node) for each in jobs}
    given = {each.job_id: each.held if each.stays else 0 for each in jobs}
    left = capacity - sum(given.values())
    for each in sorted(jobs, key=lambda each: not each.held):
        if each.comes_first and not given[each.job_id] and each.job.least <= left:
            given[each.job_id] = each.job.least
            left -= each.job.least
    heap: list[tuple[float, int, int, int]] = []

    def offer(place: int) -> None:
        """The next size of a job: the one that gains most by the worker."""
        name = jobs[place].job_id
        of_job, at = worth[name], given[name]
        gains = [
            ((value - of_job.get(at, 0.0)) / (size - at), -size)
            for size, value in of_job.items()
            if at < size <= at + left
        ]
        gain, size = max(gains, default=(0.0, 0))
        if gain > 0:
            heapq.heappush(heap, (-gain, place, at, -size))

    for place in range(len(jobs)):
        offer(place)
    while heap and left > 0:
        _, place, at, size = heapq.heappop(heap)
        name = jobs[place].job_id
        if size - at > left:
            offer(place)
            continue
        given[name] = size
        left -= size - at
        offer(place)
    return given
