"""A tape played forward and backward: what lies there on its way."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from service.planning.model.op_trace import Books, Op, OpTrace, Segment

FP32 = 4


class Gradients(StrEnum):
    """Where the gradients go."""

    KEPT = "kept"
    """They stay where they were made."""
    COPIED = "copied"
    """Into DDP's buckets, which are always there."""
    SCATTERED = "scattered"
    """FSDP2: weights are gathered for a block at a time, and each rank keeps its part of the
    block's gradients."""


@dataclass(frozen=True)
class MemorySimulation:
    """How a tape is played."""

    recompute: str = "none"
    gradients: Gradients = Gradients.KEPT
    holders: int = 1
    """SCATTERED: among how many."""
    gathers_again: bool = True
    """SCATTERED: for the backward pass (ZeRO 3)."""
    adds_to_gradients: bool = False
    """There are some of micro-batches before."""
    weight_bytes: int = FP32
    """SCATTERED: of an element of the weights as they are gathered, and of their gradients."""
    reduce_bytes: int = FP32
    """SCATTERED: of an element of the gradients as they are sent."""
    keeps_casts: bool = False
    """Autocast's copies stay from before the forward pass until after the backward pass."""


@functools.lru_cache(maxsize=512)
def saved_bytes(tape: OpTrace, how: MemorySimulation) -> float:
    """What a micro-batch's forward pass leaves for its backward pass."""
    player = _Simulator(tape, how)
    player.forward()
    return player.books.now - player.gathered


@functools.lru_cache(maxsize=512)
def peak_bytes(tape: OpTrace, how: MemorySimulation) -> float:
    """Of a forward and a backward pass, besides what is always there."""
    player = _Simulator(tape, how)
    player.forward()
    player.backward()
    return player.books.peak


class _Simulator:
    def __init__(self, tape: OpTrace, how: MemorySimulation) -> None:
        self.tape, self.how = tape, how
        self.books = Books(tape)
        self.last_use = _last_uses(tape)
        self.gathered = 0.0
        self._casts: list[float] = []  # that only autocast holds
        self._gradients: dict[int, list[float]] = {}  # of a tensor: [bytes, how many share them]
        self._scattered = 0.0  # what the scatter before still reads
        self._buffer = 0.0  # that the block before was gathered into
        self._is_gathered_ahead = False

    def forward(self) -> None:
        self._gather(self._root_weights(), keeps=True)
        for segment in self.tape.segments:
            now, gathered, casts = self.books.now, self.gathered, len(self._casts)
            self._forward(segment)
            more = segment.times - 1
            self.books.now += more * (self.books.now - now)
            self.gathered += more * (self.gathered - gathered)
            self._casts += more * self._casts[casts:]
        self.books.free(self._buffer)
        if self._is_sharded and self.how.gathers_again:
            self.books.free(self._root_weights())
        if not self.how.keeps_casts:
            for size in self._casts:
                self.books.free(size)
            self._casts = []

    def backward(self) -> None:
        segments = self.tape.segments
        last = segments[-1].ops[-1].output
        self._give(last, [self.tape.gradient_bytes[last], 0])
        if self._is_sharded and self.how.gathers_again:
            self.books.take(self._root_weights())
        for number in reversed(range(len(segments))):
            now = self.books.now
            self._backward(segments[number], segments[number - 1] if number else None)
            self.books.now += (segments[number].times - 1) * (self.books.now - now)
        if self._is_sharded:
            self._scatter(self._root_weights())

    def _forward(self, segment: Segment) -> None:
        own = self._weights(segment) if segment.is_block else 0.0
        if own and self._is_sharded:
            # The buffer that was gathered into is let go when the next one is there.
            buffer = own if self.how.holders > 1 else 0.0
            self.books.take(buffer)
            self.books.free(self._buffer)
            self._buffer = buffer
            self._gather(own, keeps=not self.how.gathers_again)
        keeps = segment.is_block and self.how.recompute != "none"
        for op in segment.ops:
            self._do(op, saves=not keeps)
            if keeps and self.how.recompute == "selective" and op.is_costly:
                self.books.hold((op.output,))
                self.books.take(op.own_bytes)
            self._let_go(op)
        if keeps:
            self.books.hold(_outside(segment))
        if own and self._is_sharded and self.how.gathers_again:
            self.books.free(own)

    def _backward(self, segment: Segment, ahead: Segment | None) -> None:
        """ahead: whose turn is next."""
        own = self._weights(segment) if segment.is_block and self._is_sharded else 0.0
        if own and self.how.gathers_again:
            self.books.take(own if self._is_gathered_ahead else 2 * own)
            self.books.free(own)  # the buffer
            self._is_gathered_ahead = ahead is not None and ahead.is_block
            if ahead is not None and self._is_gathered_ahead:
                self.books.take(self._weights(ahead))
        if segment.is_block and self.how.recompute != "none":
            self._again(segment)
        for op in reversed(segment.ops):
            self._undo(op)
        if own:
            self._scatter(own)

    @property
    def _is_sharded(self) -> bool:
        return self.how.gradients is Gradients.SCATTERED

    def _weights(self, segment: Segment) -> float:
        return self.how.weight_bytes * sum(op.parameters for op in segment.ops)

    def _cast_bytes(self, op: Op) -> float:
        """Nothing where the weights come as small as autocast would make them."""
        return op.cast * self.tape.cast_bytes if self.how.weight_bytes == FP32 else 0.0

    def _root_weights(self) -> float:
        return sum(self._weights(each) for each in self.tape.segments if not each.is_block)

    def _gather(self, size: float, *, keeps: bool) -> None:
        if self._is_sharded:
            self.books.take(size)
            self.gathered += size if keeps and not self.how.gathers_again else 0.0

    def _do(self, op: Op, *, saves: bool) -> None:
        books = self.books
        cast = self._cast_bytes(op)
        if not self.how.keeps_casts:
            books.take(cast)
            if not saves and cast:
                self._casts.append(cast)
        books.hold((op.output,))
        books.touch(op.temporary_bytes)
        if saves:
            books.hold(op.saved)
            books.take(op.own_bytes)

    def _let_go(self, op: Op) -> None:
        self.books.release(t for t in set(op.inputs) if self.last_use.get(t) == id(op))

    def _again(self, segment: Segment) -> None:
        """Do a block's operations once more, now with what they save."""
        made = []
        for op in segment.ops:
            self._do(op, saves=True)
            made.append(op.output)
            if self.how.recompute == "selective" and op.is_costly:
                self.books.release((op.output,))
                self.books.free(op.own_bytes)
        self.books.release(made)
        self.books.release(_outside(segment))

    def _undo(self, op: Op) -> None:
        """The backward pass of one operation."""
        books, tape = self.books, self.tape
        coming = self._gradients.pop(op.output, [0.0, 1])
        wanting = [t for t in op.inputs if tape.wants_gradient(t)]
        if op.passes_on:
            for tensor in wanting:
                coming[1] += 1
                self._give(tensor, coming)
        else:
            for tensor in wanting:
                size = tape.gradient_bytes[tensor]
                books.take(size)
                self._give(tensor, [size, 1])
        books.touch(op.temporary_bytes + self._cast_bytes(op))
        self._keep_gradient(self.how.weight_bytes * op.parameters)
        books.release(op.saved)
        books.free(op.own_bytes)
        if not self.how.keeps_casts:
            books.free(self._cast_bytes(op))
        self._drop(coming)

    def _give(self, tensor: int, gradient: list[float]) -> None:
        """Add it to what the tensor has already."""
        there = self._gradients.get(tensor)
        if there is None:
            self._gradients[tensor] = gradient
            return
        size = max(there[0], gradient[0])
        self.books.take(size)
        self._drop(there)
        self._drop(gradient)
        self._gradients[tensor] = [size, 1]

    def _drop(self, gradient: list[float]) -> None:
        gradient[1] -= 1
        if gradient[1] == 0:
            self.books.free(gradient[0])

    def _keep_gradient(self, size: float) -> None:
        self.books.take(size)
        if self.how.gradients is Gradients.COPIED or self.how.adds_to_gradients:
            self.books.free(size)

    def _scatter(self, weights: float) -> None:
        """Let go of a block's weights, and keep a part of its gradients."""
        books, elements = self.books, weights / self.how.weight_bytes
        part = FP32 * elements / self.how.holders
        books.free(self._scattered)
        books.free(weights)
        if self.how.adds_to_gradients:
            return
        if self.how.holders > 1:
            sent = self.how.reduce_bytes * elements
            books.take(sent)
            books.free(weights)
            books.take(part)
            self._scattered = sent
        else:
            self._scattered = 0.0


def _last_uses(tape: OpTrace) -> dict[int, int]:
    """By tensor, which operation reads it last."""
    return {t: id(op) for segment in tape.segments for op in segment.ops for t in op.inputs}


def _outside(segment: Segment) -> Iterable[int]:
    """What the segment reads of others."""
    made = {op.output for op in segment.ops}
    return sorted({t for op in segment.ops for t in op.inputs} - made)
