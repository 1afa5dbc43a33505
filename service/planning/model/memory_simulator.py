"""Simulation of the memory that a trace uses in the forward and the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from service.planning.model.op_trace import MemoryUse, Op, OpTrace, Segment

FP32 = 4


class Gradients(StrEnum):
    """The location at which gradients are stored."""

    KEPT = "kept"
    """Gradients remain where the backward pass creates them."""
    COPIED = "copied"
    """Gradients are copied to DDP's buckets, which are permanently allocated."""
    SCATTERED = "scattered"
    """FSDP2: weights are gathered for one block at a time, and each rank keeps its part of the
    block's gradients."""


@dataclass(frozen=True)
class MemorySimulation:
    """Options of a simulation."""

    recompute: str = "none"
    gradients: Gradients = Gradients.KEPT
    holders: int = 1
    """SCATTERED: number of ranks that share the weights."""
    gathers_again: bool = True
    """SCATTERED: whether the weights are gathered again for the backward pass (ZeRO 3)."""
    adds_to_gradients: bool = False
    """Whether gradients of earlier micro-batches already exist."""
    weight_bytes: int = FP32
    """SCATTERED: bytes per element of the gathered weights and of their gradients."""
    frozen_bytes: int = FP32
    """SCATTERED: bytes per element of the gathered weights that are not trained."""
    reduce_bytes: int = FP32
    """SCATTERED: bytes per element of the sent gradients."""
    keeps_casts: bool = False
    """Whether autocast's copies exist from before the forward pass until after the backward
    pass."""


@functools.lru_cache(maxsize=512)
def saved_bytes(trace: OpTrace, how: MemorySimulation) -> float:
    """Return the number of bytes that the forward pass of a micro-batch keeps for its backward
    pass."""
    simulator = _Simulator(trace, how)
    simulator.forward()
    return simulator.memory.now - simulator.gathered


@functools.lru_cache(maxsize=512)
def peak_bytes(trace: OpTrace, how: MemorySimulation) -> float:
    """Return the peak memory of a forward and a backward pass, excluding permanently
    allocated memory."""
    simulator = _Simulator(trace, how)
    simulator.forward()
    simulator.backward()
    return simulator.memory.peak


class _Simulator:
    def __init__(self, trace: OpTrace, how: MemorySimulation) -> None:
        self.trace, self.how = trace, how
        self.memory = MemoryUse(trace)
        self.last_use = _last_uses(trace)
        self.gathered = 0.0
        self._casts: list[float] = []  # copies that are referenced only by autocast
        self._gradients: dict[int, list[float]] = {}  # by tensor: [bytes, reference count]
        self._scattered = 0.0  # gradients that the previous scatter is still reading
        self._buffer = 0.0  # buffer into which the previous block was gathered
        self._is_gathered_ahead = False

    def forward(self) -> None:
        self._gather(self._root_weights(), keeps=True)
        for segment in self.trace.segments:
            now, gathered, casts = self.memory.now, self.gathered, len(self._casts)
            self._forward(segment)
            more = segment.times - 1
            self.memory.now += more * (self.memory.now - now)
            self.gathered += more * (self.gathered - gathered)
            self._casts += more * self._casts[casts:]
        self.memory.free(self._buffer)
        if self._is_sharded and self.how.gathers_again:
            self.memory.free(self._root_weights())
        if not self.how.keeps_casts:
            for size in self._casts:
                self.memory.free(size)
            self._casts = []

    def backward(self) -> None:
        segments = self.trace.segments
        last = segments[-1].ops[-1].output
        self._give(last, [self.trace.gradient_bytes[last], 0])
        if self._is_sharded and self.how.gathers_again:
            self.memory.take(self._root_weights())
        for number in reversed(range(len(segments))):
            if segments[number].is_forward_only:
                break
            now = self.memory.now
            self._backward(segments[number], segments[number - 1] if number else None)
            self.memory.now += (segments[number].times - 1) * (self.memory.now - now)
        if self._is_sharded:
            roots = (each for each in self.trace.segments if not each.is_block)
            self._scatter(self._root_weights(), sum(map(self._trained, roots)))

    def _forward(self, segment: Segment) -> None:
        own = self._weights(segment) if segment.is_block else 0.0
        if segment.is_repeated and not self.how.gathers_again:
            own = 0.0  # counted when the other segment is gathered, which ends later
        if own and self._is_sharded:
            # The buffer of the previous block is freed after the buffer of this block is allocated.
            buffer = own if self.how.holders > 1 else 0.0
            self.memory.take(buffer)
            self.memory.free(self._buffer)
            self._buffer = buffer
            self._gather(own, keeps=not self.how.gathers_again)
        keeps = segment.is_block and self.how.recompute != "none" and not segment.is_forward_only
        for op in segment.ops:
            if segment.is_forward_only:
                self._do_alone(op)
            else:
                self._do(op, saves=not keeps)
            if keeps and self.how.recompute == "selective" and op.is_costly:
                self.memory.hold((op.output,))
                self.memory.take(op.own_bytes)
            self._release_inputs(op)
        if keeps:
            self.memory.hold(_outside(segment))
        if own and self._is_sharded and self.how.gathers_again:
            self.memory.free(own)

    def _backward(self, segment: Segment, ahead: Segment | None) -> None:
        """Simulate the backward pass of a segment. `ahead` is the next segment in the backward
        pass."""
        own = self._weights(segment) if segment.is_block and self._is_sharded else 0.0
        if own and self.how.gathers_again:
            self.memory.take(own if self._is_gathered_ahead else 2 * own)
            self.memory.free(own)  # the buffer
            self._is_gathered_ahead = ahead is not None and ahead.is_block
            if ahead is not None and self._is_gathered_ahead:
                self.memory.take(self._weights(ahead))
        if segment.is_block and self.how.recompute != "none":
            self._again(segment)
        for op in reversed(segment.ops):
            self._backward_of(op)
        if own:
            self._scatter(own, self._trained(segment))

    @property
    def _is_sharded(self) -> bool:
        return self.how.gradients is Gradients.SCATTERED

    def _weights(self, segment: Segment) -> float:
        """Return the bytes of all weights of a segment."""
        trained, frozen = self.how.weight_bytes, self.how.frozen_bytes
        return sum(trained * op.parameters + frozen * op.frozen for op in segment.ops)

    def _trained(self, segment: Segment) -> float:
        """Return the number of elements of a segment's trained weights."""
        return sum(op.parameters for op in segment.ops)

    def _cast_bytes(self, op: Op) -> float:
        """Return the bytes of autocast's copies, which are 0 if the gathered weights already have
        16 bits."""
        return op.cast * self.trace.cast_bytes if self.how.weight_bytes == FP32 else 0.0

    def _root_weights(self) -> float:
        return sum(
            self._weights(each)
            for each in self.trace.segments
            if not each.is_block and not each.is_repeated
        )

    def _gather(self, size: float, *, keeps: bool) -> None:
        if self._is_sharded:
            self.memory.take(size)
            self.gathered += size if keeps and not self.how.gathers_again else 0.0

    def _do_alone(self, op: Op) -> None:
        """Do an operation whose result needs no gradient."""
        cast = self._cast_bytes(op)
        self.memory.take(cast)
        self.memory.hold((op.output,))
        self.memory.touch(op.temporary_bytes + op.own_bytes)
        self.memory.free(cast)

    def _do(self, op: Op, *, saves: bool) -> None:
        memory = self.memory
        cast = self._cast_bytes(op)
        is_cached = op.parameters > 0  # autocast caches only the copies of trained weights
        if not self.how.keeps_casts:
            memory.take(cast)
            if is_cached and not saves and cast:
                self._casts.append(cast)
        memory.hold((op.output,))
        memory.touch(op.temporary_bytes)
        if saves:
            memory.hold(op.saved)
            memory.take(op.own_bytes)
        if not is_cached and not (saves and self.trace.wants_gradient(op.output)):
            memory.free(cast)

    def _release_inputs(self, op: Op) -> None:
        self.memory.release(t for t in set(op.inputs) if self.last_use.get(t) == id(op))

    def _again(self, segment: Segment) -> None:
        """Recompute the operations of a block, this time keeping the tensors that they save."""
        made: set[int] = set()
        for op in segment.ops:
            self._do(op, saves=True)
            made.add(op.output)
            if self.how.recompute == "selective" and op.is_costly:
                self.memory.release((op.output,))
                self.memory.free(op.own_bytes)
            over = {t for t in made.intersection(op.inputs) if self.last_use.get(t) == id(op)}
            self.memory.release(sorted(over))
            made -= over
        self.memory.release(sorted(made))
        self.memory.release(_outside(segment))

    def _backward_of(self, op: Op) -> None:
        """Simulate the backward pass of one operation."""
        memory, trace = self.memory, self.trace
        coming = self._gradients.pop(op.output, [0.0, 1])
        wanting = [t for t in op.inputs if trace.wants_gradient(t)]
        if op.passes_on:
            for tensor in wanting:
                coming[1] += 1
                self._give(tensor, coming)
        else:
            for tensor in wanting:
                size = trace.gradient_bytes[tensor]
                memory.take(size)
                self._give(tensor, [size, 1])
        if trace.wants_gradient(op.output):
            memory.touch(op.temporary_bytes + self._cast_bytes(op))
        self._keep_gradient(self.how.weight_bytes * op.parameters)
        memory.release(op.saved)
        memory.free(op.own_bytes)
        if not self.how.keeps_casts and trace.wants_gradient(op.output):
            memory.free(self._cast_bytes(op))
        self._drop(coming)

    def _give(self, tensor: int, gradient: list[float]) -> None:
        """Add a gradient to the tensor's existing gradient, if any."""
        present = self._gradients.get(tensor)
        if present is None:
            self._gradients[tensor] = gradient
            return
        size = max(present[0], gradient[0])
        self.memory.take(size)
        self._drop(present)
        self._drop(gradient)
        self._gradients[tensor] = [size, 1]

    def _drop(self, gradient: list[float]) -> None:
        gradient[1] -= 1
        if gradient[1] == 0:
            self.memory.free(gradient[0])

    def _keep_gradient(self, size: float) -> None:
        self.memory.take(size)
        if self.how.gradients is Gradients.COPIED or self.how.adds_to_gradients:
            self.memory.free(size)

    def _scatter(self, weights: float, elements: float) -> None:
        """Free the weights of a block, and keep this rank's part of its gradients. elements: number
        of elements of the trained weights."""
        memory = self.memory
        part = FP32 * elements / self.how.holders
        memory.free(self._scattered)
        memory.free(weights)
        if self.how.adds_to_gradients:
            return
        if self.how.holders > 1:
            sent = self.how.reduce_bytes * elements
            memory.take(sent)
            memory.free(self.how.weight_bytes * elements)
            memory.take(part)
            self._scattered = sent
        else:
            self._scattered = 0.0


def _last_uses(trace: OpTrace) -> dict[int, int]:
    """Return the id of the last operation that reads each tensor."""
    return {t: id(op) for segment in trace.segments for op in segment.ops for t in op.inputs}


def _outside(segment: Segment) -> Iterable[int]:
    """Return the tensors of other segments that this segment reads."""
    made = {op.output for op in segment.ops}
    return sorted({t for op in segment.ops for t in op.inputs} - made)
