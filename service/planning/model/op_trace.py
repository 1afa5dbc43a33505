"""The operations of a step in order, and the sizes of their tensors.

A tensor exists as long as autograd keeps it: until the last operation has read it, and while it is
saved for the backward pass of an operation. Parameters and optimizer state are counted elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Op:
    """An operation. Tensors are identified by numbers that the trace assigns."""

    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...] = ()
    """Tensors that the backward pass reads."""
    own_bytes: float = 0.0
    """Bytes of other data saved for the backward pass: means, masks, indices."""
    parameters: float = 0.0
    """Number of elements of the operation's weights that are trained."""
    frozen: float = 0.0
    """Number of elements of the operation's other weights."""
    cast: float = 0.0
    """Number of elements of the weights that autocast copies to a smaller type."""
    temporary_bytes: float = 0.0
    """Bytes allocated only while the operation runs, forward or backward."""
    passes_on: bool = False
    """Whether the gradient of the output is also the gradient of the inputs, as for a view or an
    addition."""
    is_costly: bool = False
    """Whether `recompute: selective` keeps the result."""
    flops: float = 0.0
    """Number of floating point operations in the forward pass; only products are counted."""


@dataclass
class Segment:
    """Operations that are recomputed together and whose weights are gathered together."""

    ops: list[Op] = field(default_factory=list)
    is_block: bool = False
    times: int = 1
    """Number of equal consecutive segments that this segment represents."""
    is_forward_only: bool = False
    """Whether no gradients are computed, so that nothing is kept for a backward pass."""
    is_repeated: bool = False
    """Whether other segments have the same weights, which are counted there."""


class OpTrace:
    """A trace, which is recorded once for a micro-batch and simulated for any number of
    micro-batches."""

    def __init__(self, cast_bytes: int = 0) -> None:
        """`cast_bytes` is the number of bytes per element of autocast's copies of weights; 0
        without autocast."""
        self.cast_bytes = cast_bytes
        self.segments: list[Segment] = []
        self.bytes: list[float] = []
        self.gradient_bytes: list[float] = []
        self._storage: list[int] = []
        self._wants_gradient: list[bool] = []

    def begin(
        self,
        *,
        is_block: bool,
        times: int = 1,
        is_forward_only: bool = False,
        is_repeated: bool = False,
    ) -> None:
        """Start a segment. Segments without gradients come before the other segments.

        A segment with `times` above 1 must be between two segments that are equal to it. Each
        repetition adds the same amount of memory, so memory peaks in one of these two neighbours.
        """
        self.segments.append(
            Segment(
                is_block=is_block,
                times=times,
                is_forward_only=is_forward_only,
                is_repeated=is_repeated,
            )
        )

    def count(
        self, of: Callable[[Op], float], among: Callable[[Segment], bool] = lambda _: True
    ) -> float:
        """Return the sum of `of` over all operations of the segments that `among` selects."""
        return sum(each.times * sum(map(of, each.ops)) for each in self.segments if among(each))

    def given(
        self, size: float, *, wants_gradient: bool = False, gradient: float | None = None
    ) -> int:
        """Add a tensor that is not the result of a recorded operation."""
        tensor = self._tensor(size, None, wants_gradient)
        if gradient is not None:
            self.gradient_bytes[tensor] = gradient
        return tensor

    def add(
        self,
        inputs: Sequence[int],
        size: float,
        *,
        saves: Sequence[int] = (),
        saves_output: bool = False,
        view_of: int | None = None,
        parameters: float = 0.0,
        frozen: float = 0.0,
        cast: float = 0.0,
        own_bytes: float = 0.0,
        temporary_bytes: float = 0.0,
        passes_on: bool = False,
        is_costly: bool = False,
        flops: float = 0.0,
        gradient: float | None = None,
    ) -> int:
        """Record an operation and return its result.

        `size` is the size of the result in bytes, and `gradient` is the size of its gradient, if
        different.
        """
        wants = parameters > 0 or any(self._wants_gradient[each] for each in inputs)
        output = self._tensor(size, view_of, wants)
        if gradient is not None:
            self.gradient_bytes[output] = gradient
        saved = (*saves, output) if saves_output else tuple(saves)
        op = Op(
            tuple(inputs),
            output,
            saved,
            own_bytes,
            parameters,
            frozen,
            cast,
            temporary_bytes,
            passes_on or view_of is not None,
            is_costly,
            flops,
        )
        self.segments[-1].ops.append(op)
        return output

    def _tensor(self, size: float, view_of: int | None, wants_gradient: bool) -> int:
        self.bytes.append(size)
        self.gradient_bytes.append(size)
        self._storage.append(len(self._storage) if view_of is None else self._storage[view_of])
        self._wants_gradient.append(wants_gradient)
        return len(self.bytes) - 1

    def storage_of(self, tensor: int) -> int:
        return self._storage[tensor]

    def wants_gradient(self, tensor: int) -> bool:
        return self._wants_gradient[tensor]


class MemoryUse:
    """The number of bytes in use, and their peak."""

    def __init__(self, trace: OpTrace) -> None:
        self._tape = trace
        self.now = self.peak = 0.0
        self._held: Counter[int] = Counter()

    def take(self, size: float) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def free(self, size: float) -> None:
        self.now -= size

    def touch(self, size: float) -> None:
        """Allocate and immediately free this number of bytes."""
        self.peak = max(self.peak, self.now + size)

    def hold(self, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            storage = self._tape.storage_of(tensor)
            if not self._held[storage]:
                self.take(self._tape.bytes[storage])
            self._held[storage] += 1

    def release(self, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            storage = self._tape.storage_of(tensor)
            self._held[storage] -= 1
            if not self._held[storage]:
                self.free(self._tape.bytes[storage])
