"""The memory of a rank at the fullest moment of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dray.spec import Gpt, JobSpec, Parallel
from service.planning.model import gpt, images
from service.planning.model.memory_simulator import (
    FP32,
    Gradients,
    MemorySimulation,
    peak_bytes,
    saved_bytes,
)
from service.planning.model.op_trace import OpTrace
from service.planning.model.shapes import Shapes

PIECES_PER_STAGE = 2  # as ray_workers.training.parallel.model_parallel.pipeline.PER_STAGE
STATES = {"adamw": 2.0, "lamb": 2.0, "lars": 1.0, "sgd": 0.0, "adafactor": 0.0}
"""Tensors as large as the parameters that the optimizer keeps; with momentum, sgd has one."""
BUCKET_BYTES = 64 << 20  # as ray_workers.training.parallel.optim.optimizer_offload.BUCKET_BYTES
SCRATCH = {"lamb": 2.0, "lars": 1.0}
"""And that it makes for the time of its step, besides one for the parameter that it is at."""


@dataclass(frozen=True)
class Memory:
    """Bytes, of the rank that holds the most."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """All else that lies there at the fullest moment: what the backward pass needs, gathered
    weights, buffers. Where that is before the last gradient is there, less by the gradients that
    are still to come."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Pieces:
    """How a rank's share of the batch is cut."""

    size: int
    count: int


def pieces_of(spec: JobSpec) -> Pieces:
    train, parallel = spec.train, spec.parallel
    shares = spec.num_replicas * parallel.shard
    share = -(-train.global_batch_size // shares)
    if parallel.pipeline == 1:
        size = min(share, train.micro_batch_size or share)
        count = -(-share // size)
        return Pieces(-(-share // count) if spec.is_divided else size, count)
    wanted = PIECES_PER_STAGE * parallel.pipeline
    if train.micro_batch_size is not None:
        wanted = -(-share // train.micro_batch_size)
    count = -(-wanted // parallel.pipeline) * parallel.pipeline
    return Pieces(-(-share // count), count)


def memory_of(spec: JobSpec, shapes: Shapes, *, on_gpu: bool | None = None) -> Memory:
    """Of the rank that holds the most, as the document divides the model."""
    gpu = spec.resources.gpus_per_worker > 0 if on_gpu is None else on_gpu
    return max(
        (_of_rank(spec, tapes, at) for at, tapes in enumerate(tapes_of(spec, shapes, on_gpu=gpu))),
        key=lambda each: each.total,
    )


def fits(spec: JobSpec, shapes: Shapes, available_bytes: int) -> bool:
    """Whether `memory_of` says no more than that; sooner known where it does."""
    tapes = tapes_of(spec, shapes, on_gpu=spec.resources.gpus_per_worker > 0)
    if any(_held(spec, each).total > available_bytes for each in tapes):
        return False
    return all(_of_rank(spec, each, at).total <= available_bytes for at, each in enumerate(tapes))


def tapes_of(spec: JobSpec, shapes: Shapes, *, on_gpu: bool) -> list[list[OpTrace]]:
    """For each place in the pipeline, the tape of each stage there."""
    half = spec.train.precision != "fp32"
    size = pieces_of(spec).size
    parallel, model = spec.parallel, spec.model
    per_rank = parallel.stages_per_rank
    num_stages = parallel.pipeline * per_rank

    def tape(stage: int) -> OpTrace:
        if not isinstance(model, Gpt):
            at = (stage, num_stages)
            return images.record(spec, shapes, size, half=half, on_gpu=on_gpu, stage=at)
        start, stop = (_first_of(model.num_layers, n, num_stages) for n in (stage, stage + 1))
        part = gpt.Part(
            size,
            parallel.tensor,
            parallel.context,
            stop - start,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            is_stage=num_stages > 1,
        )
        assert shapes.vocabulary is not None
        return gpt.record(model, shapes.vocabulary, part, half=half, on_gpu=on_gpu)

    return [
        [tape(at + n * parallel.pipeline) for n in range(per_rank)]
        for at in range(parallel.pipeline)
    ]


def _first_of(total: int, number: int, count: int) -> int:
    """Where a share begins, as `ray_workers.training.data.sampler.share` cuts."""
    return total * number // count


class Held(NamedTuple):
    """Bytes that lie there whatever is computed."""

    weights: float
    """Of all stages of the rank, whole."""
    own: float
    """The part of them that it holds; so many again are their gradients."""
    stepped: float
    """The part of them whose optimizer state it has."""
    largest: float
    """Parameter."""
    optimizer: float

    @property
    def total(self) -> float:
        return 2 * self.own + self.optimizer


def _held(spec: JobSpec, tapes: list[OpTrace]) -> Held:
    holders = spec.parallel.shard * spec.parallel.context
    weights = FP32 * sum(elements_of(tape) for tape in tapes)
    stepped, largest = weights / holders, FP32 * _largest(tapes)
    if _shares_optimizer_alone(spec.parallel):  # by whole parameters
        stepped, holders = max(stepped, largest), 1
    return Held(weights, weights / holders, stepped, largest, stepped * _states(spec))


def _shares_optimizer_alone(parallel: Parallel) -> bool:
    return parallel.zero == 1 and parallel.shard * parallel.context > 1


def _of_rank(spec: JobSpec, tapes: list[OpTrace], at: int) -> Memory:
    parallel, pieces = spec.parallel, pieces_of(spec)
    weights, own, stepped, largest, optimizer = _held(spec, tapes)
    only_optimizer = _shares_optimizer_alone(parallel)
    holders = 1 if only_optimizer else parallel.shard * parallel.context
    exchanging = parallel.shard * parallel.context * spec.num_replicas
    base = own + optimizer + own * (spec.train.ema is not None)
    gradients = own
    agreeing = _of_agreeing(spec, weights)
    base += agreeing.kept
    if not spec.is_divided:
        has_buckets = spec.resources.num_workers > 1 and not agreeing.is_by_hand
        where = Gradients.COPIED if has_buckets else Gradients.KEPT
    else:
        where = Gradients.SCATTERED if exchanging > 1 else Gradients.KEPT
        if only_optimizer:
            where = Gradients.COPIED
    adds = pieces.count > 1
    if where is Gradients.COPIED:
        base += own  # the buckets
    if adds:
        base += weights  # of the micro-batches before, not exchanged yet
    how = MemorySimulation(
        spec.train.recompute,
        where,
        holders,
        gathers_again=parallel.zero == 3 and holders > 1,
        adds_to_gradients=adds,
        weight_bytes=2 if parallel.param_dtype != "fp32" else FP32,
        reduce_bytes=2 if parallel.reduce_dtype != "fp32" else FP32,
        keeps_casts=parallel.pipeline > 1,
    )
    if parallel.pipeline == 1:
        peak = base + peak_bytes(tapes[0], how)
    else:
        peak = base + _of_pipeline(spec, tapes, at, how, pieces.count)
    scratch = _fetched_bytes(spec, own)
    if spec.train.optimizer.name in SCRATCH:
        scratch += stepped * SCRATCH[spec.train.optimizer.name] + largest
    scratch = max(scratch, agreeing.passing) + agreeing.kept
    updating = own + optimizer + own * (spec.train.ema is not None) + gradients + scratch
    rest = max(peak, updating) - own - optimizer - gradients
    return Memory(int(own), int(gradients), int(optimizer), int(rest))


@dataclass(frozen=True)
class Agreeing:
    """What replicas hold in order to have the same weights, besides gradients and their buckets."""

    kept: float = 0.0
    passing: float = 0.0
    """When no activation lies there any more; beyond the gradients."""
    is_by_hand: bool = False
    """Without DDP, which would copy the gradients into its buckets."""


def _of_agreeing(spec: JobSpec, weights: float) -> Agreeing:
    """weights: bytes of the model's."""
    sync, momentum = spec.sync, spec.train.optimizer.momentum
    if spec.resources.num_workers == 1 or (spec.is_divided and spec.parallel.zero != 1):
        return Agreeing()
    if spec.is_exact:  # the own share's gradients; those of a slice from all, and its sum
        passing = weights * (1 + 1 / spec.resources.num_workers)
        return Agreeing(weights, passing, is_by_hand=True)
    if sync is not None and spec.takes_local_steps:
        # What was agreed on; the means, where the gradients were, and the outer gradients.
        outer = sync.outer is not None
        has_momentum = sync.outer is not None and sync.outer.momentum > 0.0
        return Agreeing(weights * (1 + has_momentum), weights * outer, is_by_hand=True)
    name = sync.compression.name if sync is not None and sync.compression is not None else ""
    if name == "powersgd":  # what was not sent; the gradient as it was, and what is not sent now
        return Agreeing(weights, 2 * weights)
    if name == "topk":  # what was not sent, and velocities in the place of the optimizer's
        return Agreeing(weights * (1 + (momentum > 0.0)))
    return Agreeing()


def _of_pipeline(
    spec: JobSpec, tapes: list[OpTrace], at: int, how: MemorySimulation, count: int
) -> float:
    """What several micro-batches take that are on their way at once, and what waits to be sent."""
    saved = [saved_bytes(tape, how) for tape in tapes]
    peaks = [peak_bytes(tape, how) for tape in tapes]
    flying = in_flight(spec, at, count)
    casts = sum(tape.cast_bytes * tape.count(lambda op: op.cast) for tape in tapes)
    gathered = 0.0
    if how.gradients is Gradients.SCATTERED:  # from the first micro-batch to the last
        gathered = how.weight_bytes * sum(elements_of(tape) for tape in tapes)
    received = 0.0
    for number, tape in enumerate(tapes):
        ops = [op for segment in tape.segments for op in segment.ops]
        stage = at + number * spec.parallel.pipeline
        if stage > 0:
            received += count * tape.gradient_bytes[ops[0].inputs[0]]
        if stage < spec.parallel.pipeline * len(tapes) - 1:
            received += count * tape.gradient_bytes[ops[-1].output]
    mean = sum(saved) / len(saved)
    return max(peaks) + (flying - 1) * mean + casts + received + gathered


def in_flight(spec: JobSpec, at: int, count: int) -> int:
    """Forward passes of a stage that wait for their backward pass, at most."""
    parallel = spec.parallel
    stages, each = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule == "gpipe":
        return count
    if each == 1 and parallel.schedule == "1f1b":
        return min(count, stages - at)
    # One more than the schedules say, as measured: a stage lets go of one when the next is there.
    warm_up = (each - 1) * stages + 2 * (stages - at - 1) + 2
    if parallel.schedule == "zero_bubble":  # the gradients of weights wait, the more the later
        warm_up += at
    return min(count * each, warm_up)


def _largest(tapes: list[OpTrace]) -> float:
    """Elements of the largest parameters that one operation has."""
    ops = (op for tape in tapes for segment in tape.segments for op in segment.ops)
    return max(op.parameters for op in ops)


def elements_of(tape: OpTrace) -> float:
    """Of the weights."""
    return tape.count(lambda op: op.parameters)


def _states(spec: JobSpec) -> float:
    """Tensors of four bytes an element that lie there between two steps, for each parameter."""
    chosen = spec.train.optimizer
    if chosen.offload:
        return 0.0
    return _moments(spec) / (2 if chosen.state_dtype == "bf16" else 1)


def _fetched_bytes(spec: JobSpec, own: float) -> float:
    """Of stowed optimizer state, what is fetched at a time."""
    chosen = spec.train.optimizer
    is_stowed = chosen.offload or chosen.state_dtype == "bf16"
    return min(own, BUCKET_BYTES) * _moments(spec) if is_stowed else 0.0


def _moments(spec: JobSpec) -> float:
    chosen = spec.train.optimizer
    compression = spec.sync.compression if spec.sync is not None else None
    if chosen.name == "sgd" and compression is not None and compression.name == "topk":
        return 0.0  # it takes the momentum over
    return 1.0 if chosen.name == "sgd" and chosen.momentum else STATES[chosen.name]
