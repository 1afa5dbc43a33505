"""The trace of a GPT stage on one rank (`ray_workers.recipes.models.gpt`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dray.spec import Gpt
from service.planning.model.op_trace import OpTrace

INDEX = 8
FP32 = 4


@dataclass(frozen=True)
class StageShare:
    """A rank's share of a micro-batch and of the model."""

    samples: int
    tensor: int = 1
    context: int = 1
    num_layers: int = 0
    is_first: bool = True
    is_last: bool = True
    is_stage: bool = False
    """Whether the share is a pipeline stage, whose output is kept until the backward pass."""


@functools.lru_cache(maxsize=256)
def record(model: Gpt, vocabulary: int, share: StageShare, *, half: bool, on_gpu: bool) -> OpTrace:
    """Record the trace. The trace is cached, so callers must not modify it. `half` is set if
    autocast uses a 16-bit type."""
    trace = OpTrace(cast_bytes=2 if half else 0)
    low = 2 if half else FP32
    split = share.tensor
    positions = share.samples * model.context_length / share.context
    values = positions * model.width
    stream = values * FP32 / split
    # Between blocks, the positions are divided among the ranks of a tensor-parallel group.
    trace.begin(is_block=False)
    if share.is_first:
        ids = trace.given(positions * INDEX)
        hidden = trace.add(
            [ids],
            stream,
            saves=[ids],
            parameters=vocabulary * model.width / split,
            temporary_bytes=values * FP32 if split > 1 else 0.0,
        )
        hidden = _dropped(trace, hidden, stream, model.dropout, on_gpu)
    else:
        hidden = trace.given(0.0, wants_gradient=True, gradient=stream)  # already counted
    for times in alike(share.num_layers):
        trace.begin(is_block=True, times=times)
        hidden = _block(trace, hidden, model, share, low, on_gpu)
    if share.is_last:
        trace.begin(is_block=False)
        _head(trace, hidden, model, vocabulary, share, low)
    elif share.is_stage:
        trace.add([hidden], 0.0, saves=[hidden], gradient=stream, passes_on=True)
    if not trace.segments[0].ops:
        del trace.segments[0]
    return trace


def alike(num_layers: int) -> list[int]:
    """Return the number of layers that each block represents. If there are more than four layers,
    the third block represents the remaining layers."""
    return [1] * num_layers if num_layers <= 4 else [1, 1, num_layers - 3, 1]


def _block(
    trace: OpTrace, hidden: int, model: Gpt, share: StageShare, low: int, on_gpu: bool
) -> int:
    split, width, heads = share.tensor, model.width, model.num_heads
    positions = share.samples * model.context_length / share.context
    values = positions * width
    stream = values * FP32 / split
    mine = values * low / split  # the heads that this rank computes
    normed = _normed(trace, hidden, stream, values, width, split, low)
    qkv = _linear(trace, normed, 3 * mine, width, 3 * width, split)
    turned = trace.add([qkv], 2 * mine, gradient=3 * mine, temporary_bytes=mine)
    saves = [turned, qkv]
    if share.context > 1:
        turned = trace.add([turned], 3 * mine, temporary_bytes=2 * mine)
        saves = [turned]
    of_queries = share.samples * heads / split * model.context_length / share.context
    chances = of_queries * model.context_length * FP32
    is_plain = model.dropout > 0 and not on_gpu  # torch has no fused kernel for this case
    mixed = trace.add(
        [turned],
        mine,
        saves=saves,
        saves_output=True,
        own_bytes=3 * chances if is_plain else of_queries * FP32,
        temporary_bytes=2 * chances if is_plain else 0.0,
        is_costly=not is_plain,
    )
    if share.context > 1:
        mixed = trace.add([mixed], mine, temporary_bytes=2 * mine)
    elif not on_gpu:  # GPU kernels return the heads in an order that needs no copy
        mixed = trace.add([mixed], mine)
    out = _linear(trace, mixed, values * low, width, width, split)
    out = _reduced(trace, out, values * low, split)
    out = _dropped(trace, out, values * low / split, model.dropout, on_gpu)
    hidden = trace.add([hidden, out], stream, passes_on=True)
    normed = _normed(trace, hidden, stream, values, width, split, low)
    inner = _linear(trace, normed, 4 * mine, width, 4 * width, split)
    active = trace.add([inner], 4 * mine, saves=[inner])
    out = _linear(trace, active, values * low, 4 * width, width, split)
    out = _reduced(trace, out, values * low, split)
    out = _dropped(trace, out, values * low / split, model.dropout, on_gpu)
    return trace.add([hidden, out], stream, passes_on=True)


def _head(
    trace: OpTrace, hidden: int, model: Gpt, vocabulary: int, share: StageShare, low: int
) -> None:
    positions = share.samples * model.context_length / share.context
    values = positions * model.width
    split = share.tensor
    normed = _normed(trace, hidden, values * FP32 / split, values, model.width, split, low)
    scores = positions * vocabulary
    logits = _linear(
        trace, normed, scores * low / split, model.width, vocabulary, split, has_bias=False
    )
    if split > 1:
        logits = trace.add([logits], scores * low, temporary_bytes=scores * low)
    if low < FP32:
        logits = trace.add([logits], scores * FP32)
        low = FP32
    targets = trace.given(positions * INDEX)
    kept = [logits] if share.is_stage else []
    chances = trace.add([logits], scores * low, saves=kept, saves_output=True)
    trace.add([chances, targets], FP32, saves=[chances, targets])


def _normed(
    trace: OpTrace, hidden: int, stream: float, values: float, width: int, split: int, low: int
) -> int:
    """Add a norm, a gather of positions divided among ranks, and a cast to the matrices' type."""
    positions = stream / width / FP32
    normed = trace.add(
        [hidden], stream, saves=[hidden], own_bytes=2 * positions * FP32, parameters=2 * width
    )
    if low < FP32:
        normed = trace.add([normed], values * low / split)
    if split > 1:
        normed = trace.add([normed], values * low, temporary_bytes=values * low)
    return normed


def _linear(
    trace: OpTrace,
    inputs: int,
    size: float,
    rows: int,
    columns: int,
    split: int,
    *,
    has_bias: bool = True,
) -> int:
    elements = (rows * columns + (columns if has_bias else 0)) / split
    return trace.add(
        [inputs], size, saves=[inputs], parameters=elements, cast=elements, is_costly=True
    )


def _reduced(trace: OpTrace, out: int, size: float, split: int) -> int:
    """Add an operation that sums a tensor over the ranks of a tensor group. Each rank keeps a share
    of the result."""
    if split == 1:
        return out
    return trace.add([out], size / split, temporary_bytes=size)


def _dropped(trace: OpTrace, inputs: int, size: float, chance: float, on_gpu: bool) -> int:
    if chance == 0.0:
        return inputs
    return trace.add([inputs], size, own_bytes=size / FP32 if on_gpu else size)
