"""Pure rules that divide workers among elastic jobs, depending on how much each job gains.

A job reports how long its steps take with its current workers. A model of the step time with few
coefficients is fitted to these reports. The model predicts the job's speed with other numbers of
workers. The workers of the cluster are assigned in increments; each increment is assigned to the
job that gains most from it. The gain of a job is its speed relative to its speed at the minimum
size, weighted by the time that the job has left. The weights keep the mean completion time low.
With equal weights, each job would get a fair share (Pollux, Qiao et al., OSDI 2021). With the
weight 1 / (remaining time), short jobs would always come first. The weight used here, 1 /
sqrt(time left), is between these two weights, as is the optimum for speeds that grow with a power
of the size (heSRPT, Berg et al. 2020, https://arxiv.org/abs/1903.09346).

At each size, a job with a batch range (`train.batch_range`) uses the batch size with the most
progress per second. The progress is the number of samples per second, times the value of a sample
in a batch of that size. With the gradient noise scale p, the value of a sample is p / (p + size),
up to a constant factor (McCandlish et al. 2018, https://arxiv.org/abs/1812.06162).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

EXPLORED = 2
"""Largest size to try, as a multiple of the largest reported size. The speed at even larger sizes
is unknown."""
RESTART_S = 30.0
"""Seconds without progress after a job's size has changed."""
LASTS_S = 300.0
"""Seconds for which a job is expected to keep a size. Within this time, the gain from the new size
must outweigh the cost of the restart."""
LEFT_POWER = 0.5
"""A job's gain is divided by its remaining time raised to this power (see the module docstring)."""
UNKNOWN_LEFT_S = 600.0
"""Assumed remaining time of a job, in seconds, until the job reports the remaining time."""
SHORTEST_S = 30.0
"""Lower bound of the time that a job has left, in seconds."""
NEARLY_NOTHING = 1e-6
CLEARLY_BETTER = 1.05
"""Factor by which the predicted progress with another batch size must exceed the current progress
for the batch size to change."""
TRIED = 1.15
"""Factor by which a batch size is favoured if it is larger than all reported batch sizes. Only a
report with a larger batch can show which part of a step's time doesn't depend on the batch size, so
larger batches are tried if little progress can be lost."""
LEAST_SHARE = 1e-4
"""Lower bound for a predicted step time, relative to the shortest reported step."""
PRIOR = 1e-3
"""Weight of the penalty that favours step times that depend only on the samples. The penalty is
added to the sum of squared relative errors."""


@dataclass(frozen=True)
class ReportedStep:
    """The duration of an optimizer step, as reported by a job."""

    num_workers: int
    num_nodes: int
    batch_size: int
    """Number of samples over all workers."""
    seconds: float


@dataclass(frozen=True)
class ElasticJob:
    """The possible sizes of a job, and the job's reports."""

    least: int
    most: int
    batch_size: int
    """The current batch size."""
    micro_batch_size: int
    """Maximum number of samples in a worker's forward pass. A larger share of the batch is computed
    in several passes."""
    step_times: tuple[ReportedStep, ...] = ()
    """Reported steps of this job and of similar earlier jobs."""
    in_place: bool = False
    """Whether the group can grow and shrink without releasing its slots and restarting."""
    steps_left: float | None = None
    """Steps left at the current batch size; None if unknown."""
    batch_range: tuple[int, int] | None = None
    """Smallest and largest batch size; None if the batch size is fixed. All batch sizes are
    multiples of the smallest batch size."""
    noise_scale: float | None = None
    """The gradient noise scale in samples; None until it is measured."""
    num_parts: int = 1
    """Number of workers that hold one replica of the model. Each size is a multiple of this
    number."""


@dataclass(frozen=True)
class Sized:
    """An elastic job whose size a plan chooses."""

    job_id: str
    job: ElasticJob
    held: int
    """Number of workers that the job has; 0 if it is waiting."""
    stays: bool = False
    """Whether the job keeps its workers. The job may still get more workers."""
    comes_first: bool = False
    """Whether the job gets its minimum size before other jobs are enlarged."""
    has_grown: bool = False
    """Whether the job got slots recently. The job must release these slots for jobs that are about
    to start, but not for running jobs."""
    has_shrunk: bool = False
    """Whether the job recently released slots to jobs that gain more from these slots. The job gets
    more slots only if no other job wants them."""


@functools.lru_cache(maxsize=4096)
def fitted(step_times: tuple[ReportedStep, ...], micro_batch_size: int) -> tuple[float, ...]:
    """Return nonnegative coefficients of `_terms` for the step time.

    The fit minimizes the squared relative errors. Time that the reports can't assign to a
    particular term is attributed to the number of samples, so a job is assumed to scale well until
    its reports show otherwise.
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
    """Return the terms of the step time: the number of passes, the samples per worker, whether the
    workers exchange data, whether they do so between nodes, and the number of workers beyond two.
    """
    share = batch_size / num_workers
    return (
        float(math.ceil(share / micro)),
        share,
        float(num_workers > 1),
        float(num_nodes > 1),
        float(max(0, num_workers - 2)),
    )


def _solve(rows: Sequence[tuple[tuple[float, ...], float]], active: Sequence[int]) -> list[float]:
    """Return the least-squares solution for the active terms; the other coefficients are 0."""
    scale = [max(terms[at] / seconds for terms, seconds in rows) or 1.0 for at in active]
    size = len(active)
    matrix = [[0.0] * (size + 1) for _ in active]
    for terms, seconds in rows:
        scaled = [terms[at] / seconds / scale[index] for index, at in enumerate(active)]
        for row, one in zip(matrix, scaled, strict=True):
            for index, other in enumerate(scaled):
                row[index] += one * other
            row[size] += one
    for index, at in enumerate(active):
        matrix[index][index] += PRIOR * (1e-3 if at == 1 else 1.0)
    for pivot in range(size):  # the matrix is positive definite
        for below in range(pivot + 1, size):
            factor = matrix[below][pivot] / matrix[pivot][pivot]
            for index in range(pivot, size + 1):
                matrix[below][index] -= factor * matrix[pivot][index]
    solved = [0.0] * NUM_TERMS
    for pivot in reversed(range(size)):
        rest = sum(
            matrix[pivot][index] * solved[active[index]] * scale[index]
            for index in range(pivot + 1, size)
        )
        solved[active[pivot]] = (matrix[pivot][size] - rest) / matrix[pivot][pivot] / scale[pivot]
    return solved


def least_run_s(min_run_s: float, num_left: int) -> float:
    """Return how many seconds a job can keep its slots before it has to release them for jobs that
    gain more.

    num_left: number of times that the job has released its slots. Each time, the period for which
    the job can keep its slots becomes longer. Within t seconds, the job therefore releases its
    slots at most sqrt(2 t / min_run_s) times, even if the estimates are wrong.
    """
    return min_run_s * (1 + num_left)


def step_s(
    job: ElasticJob, num_workers: int, per_node: int, batch_size: int | None = None
) -> float:
    """Return the predicted duration of a step in seconds. per_node: number of workers that fit on a
    node. batch_size: None for the current batch size."""
    coefficients = fitted(job.step_times, job.micro_batch_size)
    num_nodes = math.ceil(num_workers / per_node)
    terms = _terms(num_workers, num_nodes, batch_size or job.batch_size, job.micro_batch_size)
    seconds = sum(each * term for each, term in zip(coefficients, terms, strict=True))
    # Don't return 0: if all reports are from groups of several workers, all fitted terms may be 0
    # for a single worker.
    return max(seconds, LEAST_SHARE * min(each.seconds for each in job.step_times))


def best_batch(job: ElasticJob, num_workers: int, per_node: int) -> int:
    """Return the batch size with the most progress per second on `num_workers` workers. Only the
    current size, twice this size, and half of this size are compared, because the step times of
    other batch sizes can't be predicted well enough."""
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
    """Return the number of seconds in which steps with batch size `batch` make as much progress as
    one step with the current batch size."""
    seconds, now = step_s(job, num_workers, per_node, batch), job.batch_size
    if batch == now or job.noise_scale is None:
        return seconds
    gain = batch / now * (job.noise_scale + now) / (job.noise_scale + batch)
    return seconds / gain


def _least_cost(job: ElasticJob, num_workers: int, per_node: int) -> float:
    """Return `_step_cost` with the best batch size for `num_workers`."""
    chosen = best_batch(job, num_workers, per_node)
    return _step_cost(job, num_workers, per_node, chosen)


def sizes_of(job: ElasticJob, per_node: int) -> list[int]:
    """Return the sizes to compare: powers of two within a node, and above that, multiples of whole
    nodes. If the workers divide a model, these are numbers of whole replicas instead of workers."""
    if (size := job.num_parts) > 1:
        times = (replace(each, num_workers=each.num_workers // size) for each in job.step_times)
        replicas = replace(
            job,
            num_parts=1,
            least=job.least // size,
            most=job.most // size,
            batch_size=job.most,  # the document's batch is large enough for the largest size
            step_times=tuple(times),
        )
        return [size * number for number in sizes_of(replicas, max(1, per_node // size))]
    most = max(job.least, min(job.most, job.batch_size))
    if not job.in_place:  # trying another size requires a restart
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
        stride = max(1, number // 4)  # one node matters less to a larger job
    return sorted(size for size in sizes if job.least <= size <= most)


def worths(sized: Sized, per_node: int) -> dict[int, float]:
    """Return the value of each size, including the current size and size 0."""
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
    if job.in_place:  # use free slots, no matter how small the gain
        highest = 0.0
        for size in sizes:
            worth[size] = highest = max(worth[size], highest * (1 + NEARLY_NOTHING))
    return worth


def sizes(jobs: Sequence[Sized], capacity: int, per_node: int) -> dict[str, int]:
    """Return the number of workers for each job, at most `capacity` in total; 0 for a job that gets
    no workers.

    Groups that have recently grown keep their size, unless starting jobs need the slots. Without
    this rule, groups would pass slots back and forth.
    """
    worth = {each.job_id: worths(each, per_node) for each in jobs}
    given = _by_gain(jobs, worth, capacity)
    if not any(each.has_grown for each in jobs):
        return given
    started = sum(given[each.job_id] for each in jobs if not each.held)
    settled = [replace(each, stays=each.stays or each.has_grown) for each in jobs]
    kept = sum(each.held if each.stays else min(each.held, given[each.job_id]) for each in settled)
    return given if started + kept > capacity else _by_gain(settled, worth, capacity)


def _by_gain(
    jobs: Sequence[Sized], worth: Mapping[str, Mapping[int, float]], capacity: int
) -> dict[str, int]:
    given = {each.job_id: each.held if each.stays else 0 for each in jobs}
    left = capacity - sum(given.values())
    for each in sorted(jobs, key=lambda each: not each.held):
        if each.comes_first and not given[each.job_id] and each.job.least <= left:
            given[each.job_id] = each.job.least
            left -= each.job.least
    heap: list[tuple[float, int, int, int]] = []
    bounds = [each.held if each.has_shrunk else capacity for each in jobs]

    def offer(index: int) -> None:
        """Push the job's next size, which is the size with the largest gain per additional worker,
        onto the heap."""
        name = jobs[index].job_id
        of_job, at = worth[name], given[name]
        bound = min(at + left, bounds[index])
        gains = [
            ((value - of_job.get(at, 0.0)) / (size - at), -size)
            for size, value in of_job.items()
            if at < size <= bound
        ]
        gain, size = max(gains, default=(0.0, 0))
        if gain > 0:
            heapq.heappush(heap, (-gain, index, at, -size))

    for _ in range(2):  # in the second pass, jobs that have shrunk can get the remaining workers
        for index in range(len(jobs)):
            offer(index)
        while heap and left > 0:
            _, index, at, size = heapq.heappop(heap)
            name = jobs[index].job_id
            if size - at > left:
                offer(index)
                continue
            given[name] = size
            left -= size - at
            offer(index)
        if left <= 0 or not any(each.has_shrunk for each in jobs):
            break
        bounds = [capacity] * len(jobs)
    return given
