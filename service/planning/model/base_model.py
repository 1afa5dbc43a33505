"""The trace of a base model on one rank (`ray_workers.recipes.models.pretrained`): the operations
of transformers' modules, with peft's adapters."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dray.spec import Lora
from service.planning.model.base_shapes import BaseShape
from service.planning.model.gpt import alike
from service.planning.model.op_trace import OpTrace

FP32 = 4
INDEX = 8
HEAD = "lm_head"


@dataclass(frozen=True)
class TokenRows:
    """The rows of a micro-batch."""

    count: int
    length: int
    """Number of tokens of a row, including padding."""
    is_joined: bool
    """Whether rows contain several examples, whose attention is computed one after another."""
    weight_bytes: int = FP32
    """Bytes per element of the trained weights: 2 if the gathered weights have 16 bits."""


@dataclass(frozen=True)
class TraceValue:
    """A tensor of the trace."""

    tensor: int
    count: float
    """Number of elements."""
    width: int
    """Bytes per element."""


@functools.lru_cache(maxsize=256)
def record(
    shape: BaseShape,
    targets: Targets | None,
    rows: TokenRows,
    method: str = "sft",
    *,
    half: bool,
    on_gpu: bool,
) -> OpTrace:
    """Record the trace. The trace is cached, so callers must not modify it. targets: the layers
    with adapters; None if all weights are trained. method: name of the method of fine-tuning.
    `half` is set if autocast uses a 16-bit type."""
    return _BaseTrace(shape, targets, rows, method, half=half, on_gpu=on_gpu).record()


@dataclass(frozen=True)
class Targets:
    """The linear layers that have an adapter."""

    rank: int
    has_dropout: bool
    names: tuple[str, ...] | None
    """Names or last parts of names; None for all linear layers except the output layer."""
    is_dora: bool = False
    frozen_bytes: int = FP32
    """Bytes per element of the weights that are not trained."""

    @classmethod
    def of(cls, adapter: Lora | None) -> Targets | None:
        if adapter is None:
            return None
        given = adapter.target_modules
        names = None if given == "all-linear" else tuple(given)
        return cls(
            adapter.rank,
            adapter.dropout > 0.0,
            names,
            adapter.kind == "dora",
            frozen_bytes_of(adapter),
        )

    def include(self, name: str) -> bool:
        if self.names is None:
            return name != HEAD
        return any(name == one or name.endswith(f".{one}") for one in self.names)

    @property
    def are_alike(self) -> bool:
        """Whether all layers have the same adapters."""
        return not any("layers." in one or one[:1].isdigit() for one in self.names or ())


def frozen_bytes_of(adapter: Lora | None) -> int:
    """Return the number of bytes per element in which the weights that are not trained are held."""
    return 2 if adapter is not None and adapter.base_precision == "bf16" else FP32


class _BaseTrace:
    def __init__(
        self,
        shape: BaseShape,
        targets: Targets | None,
        rows: TokenRows,
        method: str,
        *,
        half: bool,
        on_gpu: bool,
    ) -> None:
        self.trace = OpTrace(cast_bytes=2 if half else 0)
        self.shape, self.targets, self.rows, self.method = shape, targets, rows, method
        self.low = 2 if half else FP32
        self.frozen = min(rows.weight_bytes, FP32 if targets is None else targets.frozen_bytes)
        # Values between layers have the type of the embedding.
        self.stream = rows.weight_bytes if targets is None else self.frozen
        self.on_gpu = on_gpu
        self.is_reference = False
        """Whether the reference of dpo is computed, without gradients."""
        self.positions = float(rows.count * rows.length)
        self.has_mask = shape.window is not None and rows.length > shape.window

    def record(self) -> OpTrace:
        if self.method == "dpo":
            self.is_reference = True
            self._pass()
            self.is_reference = False
        self._pass()
        return self.trace

    @property
    def _trains_base(self) -> bool:
        return self.targets is None and not self.is_reference

    @property
    def _adapters(self) -> Targets | None:
        """The adapters that are in use. The reference of a model with adapters is its base."""
        return None if self.is_reference else self.targets

    def _pass(self) -> None:
        shape = self.shape
        self._begin(is_block=False)
        hidden = self._embedded()
        is_alike = self.targets is None or self.targets.are_alike
        layers = alike(shape.num_layers) if is_alike else [1] * shape.num_layers
        for number, times in enumerate(layers):
            self._begin(is_block=True, times=times)
            hidden = self._block(hidden, f"model.layers.{number}")
        self._begin(is_block=False)
        normed = self._normed(hidden, shape.width)
        if self.method == "reward":
            self._rewarded(normed)
        else:
            self._scored(normed)

    def _begin(self, *, is_block: bool, times: int = 1) -> None:
        self.trace.begin(
            is_block=is_block,
            times=times,
            is_forward_only=self.is_reference,
            is_repeated=self.is_reference and self.targets is not None,
        )

    def _embedded(self) -> TraceValue:
        trace, shape = self.trace, self.shape
        ids = trace.given(2 * self.positions * INDEX)  # and positions
        # cos and sin, and the masks, exist until the last layer.
        shared = 2 * shape.num_rotations * self.positions * shape.head_dim * self.stream
        if self.has_mask:
            shared += shape.num_rotations * self.rows.count * self.rows.length**2
        count = self.positions * shape.width
        trained = self._trains_base
        weights = float(shape.vocabulary * shape.width)
        tensor = trace.add(
            [ids],
            count * self.stream,
            saves=[ids] if trained else (),
            own_bytes=shared,
            parameters=weights if trained else 0.0,
            frozen=0.0 if trained else weights,
        )
        hidden = TraceValue(tensor, count, self.stream)
        return self._made([hidden], count, self.stream) if shape.scales_embedding else hidden

    def _block(self, hidden: TraceValue, name: str) -> TraceValue:
        shape = self.shape
        normed = self._normed(hidden, shape.width)
        out = self._attended(normed, f"{name}.self_attn")
        if shape.has_norms_after:
            out = self._normed(out, shape.width)
        hidden = self._added(hidden, out)
        normed = self._normed(hidden, shape.width)
        inner, bias = shape.inner, shape.inner_bias
        gate = self._linear(normed, shape.width, inner, f"{name}.mlp.gate_proj", bias)
        active = self._made([gate], gate.count, gate.width, saves=[gate])
        up = self._linear(normed, shape.width, inner, f"{name}.mlp.up_proj", bias)
        product = self._made([active, up], up.count, up.width, saves=[active, up])
        out = self._linear(product, inner, shape.width, f"{name}.mlp.down_proj", bias)
        if shape.has_norms_after:
            out = self._normed(out, shape.width)
        return self._added(hidden, out)

    def _attended(self, normed: TraceValue, name: str) -> TraceValue:
        shape, rows = self.shape, self.rows
        width, bias = shape.width, shape.qkv_bias
        of_heads, of_kv = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
        query = self._linear(normed, width, of_heads, f"{name}.q_proj", bias)
        key = self._linear(normed, width, of_kv, f"{name}.k_proj", bias)
        value = self._linear(normed, width, of_kv, f"{name}.v_proj", bias)
        if shape.norms_queries:
            query, key = (self._normed(one, shape.head_dim) for one in (query, key))
        query, key = self._turned(query), self._turned(key)
        if self.has_mask and shape.num_kv_heads < shape.num_heads:
            # Without a mask, the kernel reads each key for several queries.
            key, value = (self._made([one], query.count, one.width) for one in (key, value))
        query, key, value = (self._lowered(one) for one in (query, key, value))
        per_query = self.positions * shape.num_heads
        own = per_query * FP32
        if self.has_mask:  # as numbers, for each layer
            own += rows.count * rows.length**2 * self.low
        flops = 2.0 * per_query * rows.length * shape.head_dim  # half of 4, because it is causal
        mixed = self._made(
            [query, key, value],
            query.count,
            self.low,
            saves=[query, key, value],
            saves_output=True,
            own_bytes=own,
            is_costly=True,
            flops=flops,
        )
        # GPU kernels return the heads in an order that needs no copy.
        if rows.is_joined or not self.on_gpu:
            mixed = self._made([mixed], mixed.count, mixed.width)
        return self._linear(mixed, of_heads, width, f"{name}.o_proj", shape.out_bias)

    def _rewarded(self, normed: TraceValue) -> None:
        """Add the new output layer, whose values are the rewards."""
        width = float(self.shape.width)
        rewards = self._product(normed, 1, width, width, width, trained=True)
        if rewards.width < FP32:
            rewards = self._made([rewards], rewards.count, FP32)
        self.trace.add([rewards.tensor], FP32)

    def _scored(self, normed: TraceValue) -> None:
        trace, shape = self.trace, self.shape
        logits = self._linear(
            normed, shape.width, shape.vocabulary, HEAD, False, is_tied=shape.is_tied
        )
        if logits.width < FP32:
            logits = self._made([logits], logits.count, FP32)
        targets = trace.given(self.positions * INDEX)
        chances = self._made([logits], logits.count, FP32, saves_output=True)
        trace.add([chances.tensor, targets], FP32, saves=[chances.tensor, targets])

    def _made(
        self,
        inputs: list[TraceValue],
        count: float,
        width: int,
        *,
        saves: list[TraceValue] | None = None,
        saves_output: bool = False,
        own_bytes: float = 0.0,
        parameters: float = 0.0,
        frozen: float = 0.0,
        cast: float = 0.0,
        temporary_bytes: float = 0.0,
        passes_on: bool = False,
        is_costly: bool = False,
        flops: float = 0.0,
    ) -> TraceValue:
        """Record an operation. Nothing is saved if no gradient is computed."""
        trace = self.trace
        tensors = [one.tensor for one in inputs]
        wants = parameters > 0 or any(map(trace.wants_gradient, tensors))
        tensor = trace.add(
            tensors,
            count * width,
            saves=[one.tensor for one in saves or ()] if wants else (),
            saves_output=saves_output and wants,
            own_bytes=own_bytes if wants else 0.0,
            parameters=parameters,
            frozen=frozen,
            cast=cast,
            temporary_bytes=temporary_bytes,
            passes_on=passes_on,
            is_costly=is_costly,
            flops=flops,
        )
        return TraceValue(tensor, count, width)

    def _added(self, hidden: TraceValue, out: TraceValue) -> TraceValue:
        return self._made([hidden, out], hidden.count, hidden.width, passes_on=True)

    def _normed(self, value: TraceValue, width: int) -> TraceValue:
        """Add a root mean square norm, which is computed in fp32 one operation at a time."""
        trained = self._trains_base
        if value.width < FP32:
            value = self._made([value], value.count, FP32)
        size = value.count * FP32
        scaled = self._made(
            [value],
            value.count,
            FP32,
            saves=[value],
            own_bytes=2 * value.count / width * FP32,
            temporary_bytes=size,
        )
        if self.stream < FP32:
            scaled = self._made([scaled], value.count, self.stream)
        return self._made(
            [scaled],
            value.count,
            self.stream,
            saves=[scaled] if trained else [],
            parameters=width if trained else 0.0,
            frozen=0.0 if trained else width,
        )

    def _turned(self, value: TraceValue) -> TraceValue:
        """Add rotary positions, whose cos and sin have the type of the stream."""
        width = max(value.width, self.stream)
        return self._made([value], value.count, width, temporary_bytes=2 * value.count * width)

    def _lowered(self, value: TraceValue) -> TraceValue:
        """Add the copy that autocast makes of an input."""
        if value.width <= self.low:
            return value
        return self._made([value], value.count, self.low)

    def _linear(
        self,
        inputs: TraceValue,
        rows: int,
        columns: int,
        name: str,
        has_bias: bool,
        *,
        is_tied: bool = False,
    ) -> TraceValue:
        weights = float(rows * columns)
        elements = weights + columns * has_bias
        held = 0.0 if is_tied else elements
        trained = self._trains_base
        result = self._product(inputs, columns, elements, held, weights, trained=trained)
        adapters = self._adapters
        if adapters is None or not adapters.include(name):
            return result
        if inputs.width < self.rows.weight_bytes:  # peft converts it to the adapter's type
            inputs = self._made([inputs], inputs.count, self.rows.weight_bytes)
        if adapters.has_dropout:
            inputs = self._made(
                [inputs], inputs.count, inputs.width, own_bytes=inputs.count * inputs.width
            )
        if adapters.is_dora:
            return self._rescaled(inputs, result, rows, columns, adapters, has_bias=has_bias)
        change = self._change(inputs, rows, columns, adapters.rank)
        change = self._made([change], change.count, change.width)  # multiplied by alpha / rank
        return self._made([result, change], result.count, result.width, passes_on=True)

    def _change(self, inputs: TraceValue, rows: int, columns: int, rank: int) -> TraceValue:
        """Add the product of the inputs and both matrices of an adapter."""
        down, up = float(rows * rank), float(rank * columns)
        middle = self._product(inputs, rank, down, down, down, trained=True)
        return self._product(middle, columns, up, up, up, trained=True)

    def _rescaled(
        self,
        inputs: TraceValue,
        result: TraceValue,
        rows: int,
        columns: int,
        adapters: Targets,
        *,
        has_bias: bool,
    ) -> TraceValue:
        """Add the sum of DoRA: both products, each multiplied by the trained length of a row of the
        weights divided by the current length (`peft.tuners.lora.dora`)."""
        width, weights = self.rows.weight_bytes, float(rows * columns)
        merged = self._merged(rows, columns, width)
        change = self._change(inputs, rows, columns, adapters.rank)
        base = result
        if adapters.has_dropout:  # the result without dropout can't be used
            inputs = self._lowered(inputs)
            flops = 2.0 * self.positions * weights
            count = self.positions * columns
            base = self._made(
                *([inputs], count, self.low), cast=weights, is_costly=True, flops=flops
            )
        elif has_bias:
            base = self._made([result], result.count, max(self.low, self.frozen))
        base = self._made([base], base.count, width, saves=[base], parameters=float(columns))
        change = self._made([change], change.count, width, saves=[change])
        change = self._made([change], change.count, width)  # multiplied by alpha / rank
        total = self._made([base, change, merged], base.count, width, passes_on=True)
        total = self._made([result, total], total.count, width, passes_on=True)
        return self._made([total], total.count, self.low) if self.low < width else total

    def _merged(self, rows: int, columns: int, width: int) -> TraceValue:
        """Add what peft keeps until the end of DoRA's layer: the product of the adapter's matrices,
        which it computes from an identity matrix, and the base's weight in the adapter's type."""
        square, size = float(rows * rows), float(rows * columns)
        identity = square * min(self.low, width)
        copies = width * (1 + (self.frozen < width))
        kept = identity + size * copies
        first = square * width + (square + size) * self.low
        peak = max(first, kept + 2 * width * size)  # the sum whose lengths are computed
        return self._made([], kept, 1, temporary_bytes=peak - kept)

    def _product(
        self,
        inputs: TraceValue,
        columns: int,
        cast: float,
        held: float,
        weights: float,
        *,
        trained: bool,
    ) -> TraceValue:
        inputs = self._lowered(inputs)
        count = self.positions * columns
        if not trained and self.frozen < FP32:
            cast = 0.0  # the weights have 16 bits already
        return self._made(
            [inputs],
            count,
            self.low,
            saves=[inputs] if trained else [],
            parameters=held if trained else 0.0,
            frozen=0.0 if trained else held,
            cast=cast,
            is_costly=True,
            flops=2.0 * self.positions * weights,
        )
