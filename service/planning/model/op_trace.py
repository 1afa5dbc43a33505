"""A step's operations in order, and how many bytes their tensors take.

Tensors live as long as autograd keeps them: while a later operation reads the tensor, or an earlier
one has saved it for its backward pass. Parameters and optimizer state are counted elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Op:
    """One operation. A tensor is the number that the trace gave it."""

    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...] = ()
    """Tensors that its backward pass reads."""
    own_bytes: float = 0.0
    """Also saved for the backward pass: means, masks, indices."""
    parameters: float = 0.0
    """Elements of the weights whose gradients it makes."""
    cast: float = 0.0
    """Of them, elements that autocast makes a smaller copy of."""
    temporary_bytes: float = 0.0
    """Held while the operation runs, forward and backward."""
    passes_on: bool = False
    """The gradient of its output is that of its inputs: a view, or an addition."""
    is_costly: bool = False
    """Whether `recompute: selective` keeps its result."""
    flops: float = 0.0
    """Of its forward pass, if it is a product."""


@dataclass
class Segment:
    """Operations that are recomputed together, and whose weights are gathered together."""

    ops: list[Op] = field(default_factory=list)
    is_block: bool = False
    times: int = 1
    """How many equal segments in a row this one stands for."""


class OpTrace:
    """Recorded once for a micro-batch, then simulated for any number of them."""

    def __init__(self, cast_bytes: int = 0) -> None:
        """cast_bytes: of an element of autocast's copies of weights; 0 without autocast."""
        self.cast_bytes = cast_bytes
        self.segments: list[Segment] = []
        self.bytes: list[float] = []
        self.gradient_bytes: list[float] = []
        self._storage: list[int] = []
        self._wants_gradient: list[bool] = []

    def begin(self, *, is_block: bool, times: int = 1) -> None:
        """Begin a segment. One that stands for several must have equal ones before and after it:
        memory grows by the same amount with each, so that the peak is at one of those."""
        self.segments.append(Segment(is_block=is_block, times=times))

    def count(self, of: Callable[[Op], float]) -> float:
        """The sum over all operations."""
        return sum(each.times * sum(map(of, each.ops)) for each in self.segments)

    def given(
        self, size: float, *, wants_gradient: bool = False, gradient: float | None = None
    ) -> int:
        """A tensor that no recorded operation makes."""
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
        cast: float = 0.0,
        own_bytes: float = 0.0,
        temporary_bytes: float = 0.0,
        passes_on: bool = False,
        is_costly: bool = False,
        flops: float = 0.0,
        gradient: float | None = None,
    ) -> int:
        """Record an operation, and return its result.

        size: bytes of the result; gradient: bytes of its gradient, if they differ.
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
    """The bytes that are held now, and the most that were held at once."""

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
        """Hold these bytes for a moment."""
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
