"""The tape of a GPT's stage, as one rank has it; see `ray_workers.recipes.models.gpt`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dray.spec import Gpt
from service.planning.model.op_trace import OpTrace

INDEX = 8
FP32 = 4


@dataclass(frozen=True)
class Part:
    """What a rank has of a micro-batch and of the model."""

    samples: int
    tensor: int = 1
    context: int = 1
    num_layers: int = 0
    is_first: bool = True
    is_last: bool = True
    is_stage: bool = False
    """Of a pipeline, which keeps what a stage gave until its backward pass."""


@functools.lru_cache(maxsize=256)
def record(model: Gpt, vocabulary: int, part: Part, *, half: bool, on_gpu: bool) -> OpTrace:
    """half: autocast to two bytes. The tape is shared: it is not to be added to."""
    tape = OpTrace(cast_bytes=2 if half else 0)
    low = 2 if half else FP32
    split = part.tensor
    places = part.samples * model.context_length / part.context
    values = places * model.width
    stream = values * FP32 / split
    """Between the blocks, ranks of a tensor group have each a part of the places."""
    tape.begin(is_block=False)
    if part.is_first:
        ids = tape.given(places * INDEX)
        hidden = tape.add(
            [ids],
            stream,
            saves=[ids],
            parameters=vocabulary * model.width / split,
            temporary_bytes=values * FP32 if split > 1 else 0.0,
        )
        hidden = _dropped(tape, hidden, stream, model.dropout, on_gpu)
    else:
        hidden = tape.given(0.0, wants_gradient=True, gradient=stream)  # among what is received
    for times in _alike(part.num_layers):
        tape.begin(is_block=True, times=times)
        hidden = _block(tape, hidden, model, part, low, on_gpu)
    if part.is_last:
        tape.begin(is_block=False)
        _head(tape, hidden, model, vocabulary, part, low, on_gpu)
    elif part.is_stage:
        tape.add([hidden], 0.0, saves=[hidden], gradient=stream, passes_on=True)
    if not tape.segments[0].ops:
        del tape.segments[0]
    return tape


def _alike(num_layers: int) -> list[int]:
    """How many layers each block of the tape stands for: of many the third for most."""
    return [1] * num_layers if num_layers <= 4 else [1, 1, num_layers - 3, 1]


def _block(tape: OpTrace, hidden: int, model: Gpt, part: Part, low: int, on_gpu: bool) -> int:
    split, width, heads = part.tensor, model.width, model.num_heads
    places = part.samples * model.context_length / part.context
    values = places * width
    stream = values * FP32 / split
    mine = values * low / split  # of the heads that this rank computes
    normed = _normed(tape, hidden, stream, values, width, split, low)
    qkv = _linear(tape, normed, 3 * mine, width, 3 * width, split)
    turned = tape.add([qkv], 2 * mine, gradient=3 * mine, temporary_bytes=mine)
    saves = [turned, qkv]
    if part.context > 1:
        turned = tape.add([turned], 3 * mine, temporary_bytes=2 * mine)
        saves = [turned]
    of_queries = part.samples * heads / split * model.context_length / part.context
    chances = of_queries * model.context_length * FP32
    is_plain = model.dropout > 0 and not on_gpu  # torch has no fused kernel for it
    mixed = tape.add(
        [turned],
        mine,
        saves=saves,
        saves_output=True,
        own_bytes=3 * chances if is_plain else of_queries * FP32,
        temporary_bytes=2 * chances if is_plain else 0.0,
        is_costly=not is_plain,
    )
    if part.context > 1:
        mixed = tape.add([mixed], mine, temporary_bytes=2 * mine)
    elif not on_gpu:  # whose kernels give the heads in an order that needs no copy
        mixed = tape.add([mixed], mine)
    out = _linear(tape, mixed, values * low, width, width, split)
    out = _reduced(tape, out, values * low, split)
    out = _dropped(tape, out, values * low / split, model.dropout, on_gpu)
    hidden = tape.add([hidden, out], stream, passes_on=True)
    normed = _normed(tape, hidden, stream, values, width, split, low)
    inner = _linear(tape, normed, 4 * mine, width, 4 * width, split)
    active = tape.add([inner], 4 * mine, saves=[inner])
    out = _linear(tape, active, values * low, 4 * width, width, split)
    out = _reduced(tape, out, values * low, split)
    out = _dropped(tape, out, values * low / split, model.dropout, on_gpu)
    return tape.add([hidden, out], stream, passes_on=True)


def _head(
    tape: OpTrace, hidden: int, model: Gpt, vocabulary: int, part: Part, low: int, on_gpu: bool
) -> None:
    places = part.samples * model.context_length / part.context
    values = places * model.width
    split = part.tensor
    normed = _normed(tape, hidden, values * FP32 / split, values, model.width, split, low)
    scores = places * vocabulary
    logits = _linear(
        tape, normed, scores * low / split, model.width, vocabulary, split, has_bias=False
    )
    if split > 1:
        logits = tape.add([logits], scores * low, temporary_bytes=scores * low)
    if low < FP32:
        logits = tape.add([logits], scores * FP32)
        low = FP32
    targets = tape.given(places * INDEX)
    kept = [logits] if part.is_stage else []
    chances = tape.add([logits], scores * low, saves=kept, saves_output=True)
    tape.add([chances, targets], FP32, saves=[chances, targets])


def _normed(
    tape: OpTrace, hidden: int, stream: float, values: float, width: int, split: int, low: int
) -> int:
    """The norm, its places gathered where they were divided, in the type of the matrices."""
    places = stream / width / FP32
    normed = tape.add(
        [hidden], stream, saves=[hidden], own_bytes=2 * places * FP32, parameters=2 * width
    )
    if low < FP32:
        normed = tape.add([normed], values * low / split)
    if split > 1:
        normed = tape.add([normed], values * low, temporary_bytes=values * low)
    return normed


def _linear(
    tape: OpTrace,
    inputs: int,
    size: float,
    rows: int,
    columns: int,
    split: int,
    *,
    has_bias: bool = True,
) -> int:
    elements = (rows * columns + (columns if has_bias else 0)) / split
    return tape.add(
        [inputs], size, saves=[inputs], parameters=elements, cast=elements, is_costly=True
    )


def _reduced(tape: OpTrace, out: int, size: float, split: int) -> int:
    """Added up over the ranks of a tensor group, each with a part of the places."""
    if split == 1:
        return out
    return tape.add([out], size / split, temporary_bytes=size)


def _dropped(tape: OpTrace, inputs: int, size: float, chance: float, on_gpu: bool) -> int:
    if chance == 0.0:
        return inputs
    return tape.add([inputs], size, own_bytes=size / FP32 if on_gpu else size)
