"""A simple model of the step time. The request can contain values for its constants.

Step time = computing + sending that does not overlap with computing + pipeline bubbles. The time
for computing is based on the number of floating point operations of matrix products in the forward
pass, the backward pass (twice the forward pass), and recomputed blocks. The time for sending is
based on the number of bytes that each rank sends along each axis with ring algorithms:
2 (n - 1) / n of the data's size for an all-reduce, and (n - 1) / n of it for a gather or scatter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dray.spec import Dpo, Gpt, JobSpec, Parallel, Pretrained
from service.planning.model.memory import (
    elements_of,
    frozen_bytes_of,
    pieces_of,
    traces_of,
)
from service.planning.model.op_trace import Op, OpTrace, Segment
from service.planning.model.shapes import Shapes

FP32 = 4
AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Fraction of the forward pass that is recomputed. `selective` recomputes everything except matrix
products."""


@dataclass(frozen=True)
class Machine:
    """Speeds from which times are computed."""

    flops_per_s: float
    """Training speed of a GPU or a CPU core, which is lower than the nominal peak speed."""
    bandwidth_bytes_per_s: float
    """Bandwidth of each worker while all workers are sending."""
    latency_s: float
    """Latency of a collective operation."""
    source: str
    """Source of the numbers, for display."""


CPU = Machine(20e9, 1e9, 1e-4, "default for a CPU core, not measured on this cluster")
GPUS = {
    "H100": Machine(300e12, 50e9, 2e-5, "default for an H100: 40% of its bf16 peak, 50 GB/s"),
    "H200": Machine(300e12, 50e9, 2e-5, "default for an H200: 40% of its bf16 peak, 50 GB/s"),
    "A100": Machine(125e12, 25e9, 2e-5, "default for an A100: 40% of its bf16 peak, 25 GB/s"),
}
GPU = Machine(50e12, 10e9, 2e-5, "default for a GPU of unknown type, not measured on this cluster")
FP32_SHARE = 0.4
"""Speed of a GPU in fp32 (with or without TF32) relative to bf16."""


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    compute_s: float
    send_s: float
    idle_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.send_s + self.idle_s


def machine_of(spec: JobSpec, accelerator: str | None) -> Machine:
    if not spec.resources.gpus_per_worker:
        return CPU
    return next((GPUS[kind] for kind in GPUS if kind in (accelerator or "")), GPU)


def step_time(spec: JobSpec, shapes: Shapes, machine: Machine) -> StepTime:
    parallel, pieces = spec.parallel, pieces_of(spec)
    speed = machine.flops_per_s
    if spec.resources.gpus_per_worker and spec.train.precision == "fp32":
        speed *= FP32_SHARE
    if not spec.resources.gpus_per_worker:
        speed *= spec.resources.cpus_per_worker
    samples = pieces.size * pieces.count
    divided = parallel.tensor * parallel.context * parallel.pipeline
    flops = sample_flops(spec, shapes)
    # The backward pass computes the gradients of the inputs and of the trained weights.
    operations = (2.0 + AGAIN[spec.train.recompute]) * flops.forward + flops.weights
    operations += flops.reference
    compute_s = operations * samples / divided / speed
    num_bytes, messages = sent(spec, shapes)
    send_s = num_bytes / machine.bandwidth_bytes_per_s + messages * machine.latency_s
    chunks = pieces.count * parallel.stages_per_rank
    bubble = (parallel.pipeline - 1) / chunks if parallel.schedule != "zero_bubble" else 0.0
    return StepTime(compute_s, send_s, bubble * compute_s)


class SampleFlops(NamedTuple):
    """Numbers of operations for one sample, counting two operations for each use of a weight."""

    forward: float
    weights: float
    """Operations that compute the gradients of the weights."""
    reference: float = 0.0
    """Operations of a forward pass for which no gradients are computed."""


def sample_flops(spec: JobSpec, shapes: Shapes) -> SampleFlops:
    model = spec.model
    if isinstance(model, Gpt):
        length, width = model.context_length, model.width
        assert shapes.vocabulary is not None
        products = model.num_layers * 12 * width**2 + width * shapes.vocabulary
        attention = model.num_layers * 2 * length * width  # half of 4, because attention is causal
        forward = length * (2.0 * products + attention)
        return SampleFlops(forward, forward)
    alone = spec.model_copy(update={"parallel": Parallel()})
    ((trace,),) = traces_of(alone, shapes, on_gpu=False)
    size = pieces_of(alone).size
    reference = trace.count(_flops, lambda segment: segment.is_forward_only) / size
    forward = trace.count(_flops) / size - reference
    if not isinstance(model, Pretrained):
        return SampleFlops(forward, forward)
    # A product with weights that are not trained saves no input.
    weights = trace.count(lambda op: op.flops * bool(op.saved)) / size
    return SampleFlops(forward, weights, reference)


def _flops(op: Op) -> float:
    return op.flops


def sent(spec: JobSpec, shapes: Shapes) -> tuple[float, float]:
    """Return (bytes, messages) that each rank sends in a step."""
    parallel, pieces = spec.parallel, pieces_of(spec)
    model = spec.model
    of_ranks = traces_of(spec, shapes, on_gpu=False)
    weights = weights_bytes(of_ranks)
    layers = model.num_layers / parallel.pipeline if isinstance(model, Gpt) else 1.0
    if shapes.base is not None:
        layers = float(shapes.base.num_layers)
    size, messages = 0.0, 0.0
    holders, data = parallel.shard * parallel.context, spec.num_replicas
    if parallel.zero == 1 and holders > 1:
        ranks = holders * data  # each rank also sends the parameters that it updates
        size += 2 * (ranks - 1) / ranks * weights + weights
        messages += 2 + layers
        holders = data = 1
    if holders > 1:
        gathers = 2 if parallel.zero == 3 else 1
        passes = pieces.count if parallel.pipeline == 1 else 1
        gathered = max(sum(_gathered(spec, trace) for trace in traces) for traces in of_ranks)
        reduced = weights / (2 if parallel.reduce_dtype != "fp32" else 1)
        size += (passes * gathered + reduced) * (holders - 1) / holders
        messages += (gathers * passes + 1) * (layers + 1)
        if isinstance(spec.method, Dpo):
            messages += passes * layers
    if data > 1:
        size += 2 * (data - 1) / data * weights / holders
        messages += layers if spec.is_divided else 2
    if parallel.pipeline > 1:  # outputs of the busiest rank, and their gradients
        given = (sum(map(_given_on, traces)) for traces in of_ranks)
        size += 2 * pieces.count * max(given)
        messages += 2 * pieces.count * parallel.stages_per_rank
    if not isinstance(model, Gpt):
        return size, messages
    low = FP32 if spec.train.precision == "fp32" else 2
    values = (
        pieces.size * pieces.count * model.context_length * model.width * low / parallel.context
    )
    if parallel.tensor > 1:  # two gathers and two scatters in a layer, forward and backward
        size += 8 * layers * values * (parallel.tensor - 1) / parallel.tensor
        messages += 8 * layers * pieces.count
    if parallel.context > 1:  # exchanges of q, k, v and the output, forward and backward
        size += 8 * layers * values / parallel.tensor * (parallel.context - 1) / parallel.context
        messages += 8 * layers * pieces.count
    return size, messages


def _gathered(spec: JobSpec, trace: OpTrace) -> float:
    """Return the bytes of the weights that FSDP2 gathers for a micro-batch."""
    parallel = spec.parallel
    gathers = 2 if parallel.zero == 3 else 1
    trained = 2 if parallel.param_dtype != "fp32" else FP32
    frozen = min(trained, frozen_bytes_of(spec))

    def times(segment: Segment) -> int:
        if segment.is_repeated and (gathers == 1 or not segment.is_block):
            return 0  # gathered for the other segment with the same weights
        return 1 if segment.is_forward_only and segment.is_block else gathers

    def size(op: Op) -> float:
        return trained * op.parameters + frozen * op.frozen

    once = trace.count(size, lambda segment: times(segment) == 1)
    return once + 2 * trace.count(size, lambda segment: times(segment) == 2)


def weights_bytes(of_ranks: Iterable[Iterable[OpTrace]]) -> float:
    """Return the bytes of the trained weights in fp32, on the rank with the most weights."""
    return FP32 * max(sum(elements_of(trace) for trace in traces) for traces in of_ranks)


def _given_on(trace: OpTrace) -> float:
    """Return the bytes that a stage sends to the next stage."""
    last = trace.segments[-1].ops[-1]
    return trace.gradient_bytes[last.output] if last.passes_on else 0.0
