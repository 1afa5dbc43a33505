"""The peak memory of a rank during a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from dray.spec import AnyMethod, Gossip, Gpt, JobSpec, Parallel, Pretrained, Sft
from service.planning.model import base_model, gpt, images
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
"""Optimizer state in multiples of the parameters' size. With momentum, the value for sgd is 1."""
BUCKET_BYTES = 64 << 20  # as ray_workers.training.parallel.optim.optimizer_offload.BUCKET_BYTES
SCRATCH = {"lamb": 2.0, "lars": 1.0}
"""Temporary memory of an optimizer step in multiples of the parameters' size, in addition to the
largest parameter."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes of the rank that needs the most memory."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """All other memory at the peak: tensors for the backward pass, gathered weights, buffers, and
    copies of the state that the document asks for. If memory peaks before all gradients exist, the
    size of the missing gradients is subtracted."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Pieces:
    """The micro-batches of a rank's share of the batch."""

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


def memory_of(spec: JobSpec, shapes: Shapes) -> Memory:
    """Return the memory of the rank that needs the most memory."""
    on_gpu = spec.resources.gpus_per_worker > 0
    return max(
        (
            _of_rank(spec, traces, at)
            for at, traces in enumerate(traces_of(spec, shapes, on_gpu=on_gpu))
        ),
        key=lambda each: each.total,
    )


def fits(spec: JobSpec, shapes: Shapes, available_bytes: int) -> bool:
    """Whether `memory_of` is at most `available_bytes`. Faster than `memory_of` if the job does not
    fit."""
    traces = traces_of(spec, shapes, on_gpu=spec.resources.gpus_per_worker > 0)
    if any(_held(spec, each).total > available_bytes for each in traces):
        return False
    return all(_of_rank(spec, each, at).total <= available_bytes for at, each in enumerate(traces))


def traces_of(spec: JobSpec, shapes: Shapes, *, on_gpu: bool) -> list[list[OpTrace]]:
    """Return the traces of the stages at each position of the pipeline."""
    half = spec.train.precision != "fp32"
    size = pieces_of(spec).size
    parallel, model = spec.parallel, spec.model
    per_rank = parallel.stages_per_rank
    num_stages = parallel.pipeline * per_rank

    def trace(stage: int) -> OpTrace:
        if isinstance(model, Pretrained):
            assert shapes.base is not None
            method = spec.method
            assert method is not None
            count = size * rows_of(method)
            is_joined = isinstance(method, Sft) and method.packing
            length = shapes.length or method.max_length
            is_low = parallel.is_sharded and parallel.param_dtype != "fp32"
            rows = base_model.TokenRows(count, length, is_joined, 2 if is_low else FP32)
            targets = base_model.Targets.of(model.adapter)
            how = {"half": half, "on_gpu": on_gpu}
            return base_model.record(shapes.base, targets, rows, method.name, **how)
        if not isinstance(model, Gpt):
            at = (stage, num_stages)
            return images.record(spec, shapes, size, half=half, on_gpu=on_gpu, stage=at)
        start, stop = (_first_of(model.num_layers, n, num_stages) for n in (stage, stage + 1))
        share = gpt.StageShare(
            size,
            parallel.tensor,
            parallel.context,
            stop - start,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            is_stage=num_stages > 1,
        )
        assert shapes.vocabulary is not None
        return gpt.record(model, shapes.vocabulary, share, half=half, on_gpu=on_gpu)

    return [
        [trace(at + n * parallel.pipeline) for n in range(per_rank)]
        for at in range(parallel.pipeline)
    ]


def rows_of(method: AnyMethod) -> int:
    """Return the number of rows of a sample: a row for each answer of a preference pair."""
    return 1 if isinstance(method, Sft) else 2


def _first_of(total: int, number: int, count: int) -> int:
    """Return the index at which a share begins, as in `ray_workers.training.data.sampler.share`."""
    return total * number // count


class Held(NamedTuple):
    """Bytes that a rank holds throughout the step."""

    weights: float
    """All trained weights of the rank's stages, before they are divided."""
    own: float
    """The trained weights that the rank holds, whose gradients have the same size."""
    frozen: float
    """The other weights that the rank holds."""
    stepped: float
    """The weights whose optimizer state is on the rank."""
    largest: float
    """The largest parameter."""
    optimizer: float

    @property
    def total(self) -> float:
        return 2 * self.own + self.frozen + self.optimizer


def _held(spec: JobSpec, traces: list[OpTrace]) -> Held:
    holders = spec.parallel.shard * spec.parallel.context
    weights = FP32 * sum(elements_of(trace) for trace in traces)
    frozen = frozen_bytes_of(spec) * sum(frozen_elements_of(trace) for trace in traces)
    stepped, largest = weights / holders, FP32 * _largest(traces)
    if _shares_optimizer_alone(spec.parallel):  # complete parameters are assigned to ranks
        stepped, holders = max(stepped, largest), 1
    optimizer = stepped * _states(spec)
    return Held(weights, weights / holders, frozen / holders, stepped, largest, optimizer)


def _shares_optimizer_alone(parallel: Parallel) -> bool:
    return parallel.zero == 1 and parallel.shard * parallel.context > 1


def _of_rank(spec: JobSpec, traces: list[OpTrace], at: int) -> Memory:
    parallel, pieces = spec.parallel, pieces_of(spec)
    held = _held(spec, traces)
    weights, own, frozen, stepped, largest, optimizer = held
    only_optimizer = _shares_optimizer_alone(parallel)
    holders = 1 if only_optimizer else parallel.shard * parallel.context
    exchanging = parallel.shard * parallel.context * spec.num_replicas
    share = own + optimizer + own * (spec.train.ema is not None)
    base = share + frozen
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
        base += weights  # gradients of earlier micro-batches, which are not exchanged yet
    how = MemorySimulation(
        spec.train.recompute,
        where,
        holders,
        gathers_again=parallel.zero == 3 and holders > 1,
        adds_to_gradients=adds,
        weight_bytes=2 if parallel.param_dtype != "fp32" else FP32,
        frozen_bytes=2 if parallel.param_dtype != "fp32" else frozen_bytes_of(spec),
        reduce_bytes=2 if parallel.reduce_dtype != "fp32" else FP32,
        keeps_casts=parallel.pipeline > 1,
    )
    if parallel.pipeline == 1:
        peak = base + peak_bytes(traces[0], how)
    else:
        peak = base + _of_pipeline(spec, traces, at, how, pieces.count)
    copies = 0.0 if spec.resources.gpus_per_worker else _of_copies(spec, held)
    peak += copies
    scratch = _fetched_bytes(spec, own)
    if spec.train.optimizer.name in SCRATCH:
        scratch += stepped * SCRATCH[spec.train.optimizer.name] + largest
    scratch = max(scratch, agreeing.passing) + agreeing.kept
    updating = share + frozen + gradients + scratch + copies
    parameters = own + frozen
    rest = max(peak, updating) - parameters - optimizer - gradients
    return Memory(int(parameters), int(gradients), int(optimizer), int(rest))


def copies_bytes(spec: JobSpec, shapes: Shapes) -> int:
    """Return the host memory, in bytes, that `checkpoint.in_memory` uses at least on each rank; 0
    unless the document asks for copies."""
    if isinstance(spec.checkpoint.in_memory, str):
        return 0
    traces = traces_of(spec, shapes, on_gpu=spec.resources.gpus_per_worker > 0)
    held = [_held(spec, each) for each in traces]
    if _shares_optimizer_alone(spec.parallel):  # there may be a rank without a parameter
        held = [each._replace(stepped=0.0) for each in held]
    return int(min(_of_copies(spec, each) for each in held))


def _of_copies(spec: JobSpec, held: Held) -> float:
    """Return the bytes of `checkpoint.in_memory`: two generations of the rank's share of the state
    and of the shares that it keeps for others. With `auto`, they are kept only if they fit."""
    rule = spec.checkpoint.in_memory
    if isinstance(rule, str):
        return 0.0
    share = held.own + held.stepped * _stored_moments(spec)
    share += held.own * (spec.train.ema is not None)
    return 2 * (1 + rule.copies) * share


@dataclass(frozen=True)
class Agreeing:
    """Bytes needed to keep the weights of replicas equal, in addition to gradients and their
    buckets."""

    kept: float = 0.0
    passing: float = 0.0
    """Temporary bytes, used after all activations are freed, in addition to the gradients."""
    is_by_hand: bool = False
    """Whether DDP is not used. DDP would copy the gradients to its buckets."""


def _of_agreeing(spec: JobSpec, weights: float) -> Agreeing:
    """Return the memory, in bytes, that a job needs to keep its replicas in sync. `weights` is the
    size of the model's weights in bytes."""
    momentum = spec.train.optimizer.momentum
    if spec.resources.num_workers == 1 or (spec.is_divided and spec.parallel.zero != 1):
        return Agreeing()
    if spec.is_exact:
        # Persistent memory: the gradients computed from the rank's share of the batch. Temporary
        # memory: a slice of the gradients from each rank, and the sum of these slices.
        passing = weights * (1 + 1 / spec.resources.num_workers)
        return Agreeing(weights, passing, is_by_hand=True)
    if spec.takes_local_steps:
        # Persistent memory: the weights after the last averaging, and the outer momentum if used.
        # Temporary memory: the outer gradients.
        outer = spec.outer is not None
        has_momentum = spec.outer is not None and spec.outer.momentum > 0.0
        return Agreeing(weights * (1 + has_momentum), weights * outer, is_by_hand=True)
    if isinstance(spec.sync, Gossip):
        return _of_gossip(spec.sync, spec.resources.num_workers, weights)
    name = spec.compression.name if spec.compression is not None else ""
    if (
        name == "powersgd"
    ):  # persistent: the unsent residual; temporary: the original gradient and new residual
        return Agreeing(weights, 2 * weights)
    if (
        name == "topk"
    ):  # persistent: the unsent residual, and the velocities instead of the momentum
        return Agreeing(weights * (1 + (momentum > 0.0)))
    return Agreeing()


def _of_gossip(sync: Gossip, num_ranks: int, weights: float) -> Agreeing:
    if sync.mode == "ad_psgd":
        # Persistent memory: the shared copy, and the values last read from it. Temporary memory:
        # the difference between the copy and these values, and the two copies that are averaged.
        return Agreeing(2 * weights, 3 * weights, is_by_hand=True)
    # Persistent memory: the copy that is being sent, and the copies that are being received.
    degrees = Counter(other for _, other in sync.edges or ())
    if sync.mode == "d_psgd":
        degrees += Counter(one for one, _ in sync.edges or ())
    ring = 1 if sync.mode == "sgp" or num_ranks == 2 else 2
    most = {"ring": ring, "complete": 0, "custom": max(degrees.values(), default=0)}
    return Agreeing(weights * (1 + most.get(sync.graph, 1)), is_by_hand=True)


def _of_pipeline(
    spec: JobSpec, traces: list[OpTrace], at: int, how: MemorySimulation, count: int
) -> float:
    """Return the bytes of the activations of micro-batches in flight, and of the tensors waiting to
    be sent."""
    saved = [saved_bytes(trace, how) for trace in traces]
    peaks = [peak_bytes(trace, how) for trace in traces]
    flying = in_flight(spec, at, count)
    casts = sum(trace.cast_bytes * trace.count(lambda op: op.cast) for trace in traces)
    gathered = 0.0
    if how.gradients is Gradients.SCATTERED:  # they exist from the first micro-batch to the last
        gathered = how.weight_bytes * sum(elements_of(trace) for trace in traces)
    received = 0.0
    for number, trace in enumerate(traces):
        ops = [op for segment in trace.segments for op in segment.ops]
        stage = at + number * spec.parallel.pipeline
        if stage > 0:
            received += count * trace.gradient_bytes[ops[0].inputs[0]]
        if stage < spec.parallel.pipeline * len(traces) - 1:
            received += count * trace.gradient_bytes[ops[-1].output]
    mean = sum(saved) / len(saved)
    return max(peaks) + (flying - 1) * mean + casts + received + gathered


def in_flight(spec: JobSpec, at: int, count: int) -> int:
    """Return the maximum number of a stage's forward passes that wait for their backward pass."""
    parallel = spec.parallel
    stages, each = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule == "gpipe":
        return count
    if each == 1 and parallel.schedule == "1f1b":
        return min(count, stages - at)
    # Measurements show one micro-batch more than the theory predicts, because a stage frees a
    # micro-batch only after the next one has arrived.
    warm_up = (each - 1) * stages + 2 * (stages - at - 1) + 2
    if parallel.schedule == "zero_bubble":  # weight gradients are delayed, by more on later stages
        warm_up += at
    return min(count * each, warm_up)


def _largest(traces: list[OpTrace]) -> float:
    """Return the largest number of parameters of a single operation."""
    ops = (op for trace in traces for segment in trace.segments for op in segment.ops)
    return max(op.parameters for op in ops)


def elements_of(trace: OpTrace) -> float:
    """Return the number of elements of the trained weights."""
    return trace.count(lambda op: op.parameters)


def frozen_elements_of(trace: OpTrace) -> float:
    """Return the number of elements of the weights that are not trained."""
    return trace.count(lambda op: op.frozen, lambda segment: not segment.is_repeated)


def frozen_bytes_of(spec: JobSpec) -> int:
    """Return the number of bytes per element in which the ranks hold weights that are not
    trained."""
    model = spec.model
    return base_model.frozen_bytes_of(model.adapter) if isinstance(model, Pretrained) else FP32


def _states(spec: JobSpec) -> float:
    """Return the size of the optimizer state on the device between steps, in fp32 tensors per
    parameter."""
    return 0.0 if spec.train.optimizer.offload else _stored_moments(spec)


def _stored_moments(spec: JobSpec) -> float:
    """Return the size of the optimizer state between steps, in fp32 tensors per parameter."""
    return _moments(spec) / (2 if spec.train.optimizer.state_dtype == "bf16" else 1)


def _fetched_bytes(spec: JobSpec, own: float) -> float:
    """Return the bytes of offloaded or packed optimizer state that are fetched at a time."""
    chosen = spec.train.optimizer
    is_fetched = chosen.offload or chosen.state_dtype == "bf16"
    return min(own, BUCKET_BYTES) * _moments(spec) if is_fetched else 0.0


def _moments(spec: JobSpec) -> float:
    chosen = spec.train.optimizer
    compression = spec.compression
    if chosen.name == "sgd" and compression is not None and compression.name == "topk":
        return 0.0  # the compression stores the momentum
    return 1.0 if chosen.name == "sgd" and chosen.momentum else STATES[chosen.name]
