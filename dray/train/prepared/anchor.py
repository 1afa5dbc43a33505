"""The anchor of a batch: the state from which another process can continue in the middle of the
batch.

When the loader hands out a batch, an anchor is created, and small parts of the state are copied.
Weights and optimizer states don't change until an optimizer steps. Most programs exchange gradients
once per batch and step after the exchange, so they need no copies of the weights and optimizer
states. If a program exchanges gradients after an optimizer has already stepped in the same batch,
that optimizer is copied before its first step in each later batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dray.train.prepared.copies import changed, leaves

COPIED_BYTES = 1 << 16
"""Maximum size, in bytes, of the tensors of tracked objects that are copied with each batch. Larger
tensors, such as an average of the weights, must not change before the last exchange of the
batch."""

Result = Sequence[Tensor]
"""The result of one operation, which is the same on every rank."""


@dataclass(frozen=True)
class LoaderPosition:
    """The position of a loader that has handed out `batch` global batches of the epoch."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class KeptOptimizer:
    """A copy of an optimizer, made before its first step of the batch."""

    weights: dict[int, Tensor]
    """Weights, keyed by the parameter's id."""
    state: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer) -> KeptOptimizer:
        weights = {id(p): p.detach().clone() for p in parameters_of([optimizer])}
        return cls(weights, copied(optimizer.state_dict(), whole=True))


@dataclass
class Anchor:
    """The state at the first batch after the last exchange."""

    position: LoaderPosition
    ops: int
    steps: int
    parts: int
    """Number of calls of `prepare` after the first call."""
    tracked: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    """The parameter groups of each optimizer, without the parameters."""
    buffers: list[Tensor]
    gradients: list[Tensor | None] | None
    """Gradients that the next backward pass adds to; None if the script does not accumulate
    gradients over batches."""
    has_gradients: list[bool]
    """For each parameter, whether it has a gradient, even if the gradient is not kept. An optimizer
    skips parameters whose gradient is None, but updates parameters whose gradient is zero, for
    example after `zero_grad(set_to_none=False)`."""
    results: list[Result] = field(default_factory=list)
    """Results of the operations since the anchor."""
    begun: set[int] = field(default_factory=set)
    """Indices of the optimizers that have begun a step since the anchor."""
    kept: dict[int, KeptOptimizer] = field(default_factory=dict)
    """Copies of the optimizers that have begun a step since the anchor, keyed by the optimizer's
    index."""
    watched: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that are not copied, and their versions."""
    uses_unkept: bool = False
    """Whether the script has used gradients from before the anchor; these gradients are not
    kept."""

    is_handed_over: bool = False
    """Whether another process has started from this anchor."""

    @property
    def has_stepped(self) -> bool:
        return bool(self.begun)

    def is_whole(self) -> bool:
        """Whether another process can start the batch from the copies and the unchanged values."""
        if self.uses_unkept or not self.begun <= self.kept.keys():
            return False
        copies = {number for kept in self.kept.values() for number in kept.weights}
        return all(
            tensor._version == version
            for tensor, version in self.watched
            if id(tensor) not in copies
        )

    def weight(self, tensor: Tensor) -> Tensor:
        """Return the value of a parameter at the anchor. For a buffer, the value is arbitrary:
        buffers are copied separately."""
        for kept in self.kept.values():
            if id(tensor) in kept.weights:
                return kept.weights[id(tensor)]
        return tensor.detach()


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters of the optimizers, without duplicates."""
    every = (p for one in optimizers for group in one.param_groups for p in group["params"])
    return list(dict.fromkeys(every))


def copied(value: Any, *, whole: bool = False) -> Any:
    """Copy a value. Tensors larger than `COPIED_BYTES` are copied only if `whole` is set."""

    def copy_of(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return copy.deepcopy(one)
        is_copied = whole or one.nbytes <= COPIED_BYTES
        return one.detach().clone() if is_copied else one.detach()

    return changed(value, copy_of)


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state, and keep the types of the tensors in the state. torch itself
    converts the tensors to the types of the parameters, which would round the 32-bit masters of
    16-bit parameters."""
    optimizer.load_state_dict(dict(saved))
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    for number, parameter in enumerate(parameters_of([optimizer])):
        if number in saved["state"]:
            own = optimizer.state[parameter]
            own.update({k: _as_saved(own[k], v) for k, v in saved["state"][number].items()})


def _as_saved(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.detach().to(loaded.device)
    if isinstance(saved, dict):
        return {key: _as_saved(loaded[key], one) for key, one in saved.items()}
    if type(saved) in (list, tuple):
        pairs = zip(loaded, saved, strict=True)
        return type(saved)([_as_saved(one, other) for one, other in pairs])
    return loaded


def large_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that `copied` does not copy by default."""
    return [one for one in leaves(value) if isinstance(one, Tensor) and one.nbytes > COPIED_BYTES]


@torch.no_grad()
def set_weights(weights: Mapping[int, Tensor], parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if id(parameter) in weights:
            parameter.copy_(weights[id(parameter)])
