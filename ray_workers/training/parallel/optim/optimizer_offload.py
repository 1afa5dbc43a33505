"""Optimizer state that is stored in fewer bits, or in host memory, between steps.

The optimizer performs its step as usual, in fp32 on the parameters' device, but for one bucket of
parameters at a time. The state of a bucket is fetched before the bucket's step, and offloaded after
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dray.train.prepared.dtensor import Apart, like, local
from ray_workers.training.devices import is_gpu, on_gpu

BUCKET_BYTES = 64 << 20
"""Maximum size in bytes of the parameters whose state is fetched together. A bucket has at least
one parameter."""
NUM_STEPS = "stowed"
"""Key in the first parameter group for the optimizer's number of steps. Checkpoints contain this
name."""


Part = Callable[[Any, Tensor], Any]
"""A function that maps (state value, parameter) to the part of the value that belongs to the
parameter."""


class Later(NamedTuple):
    """A loaded value. The parameter's part of the value is computed only when it is needed."""

    part: Part
    value: Tensor
    parameter: Tensor

    def now(self) -> Tensor:
        made: Tensor = self.part(self.value, self.parameter)
        return made


def made_later(part: Part) -> Part:
    """Return a version of `part` that defers its work for values that could be moments. Other
    values, such as step counts, are not deferred."""

    def made(value: Any, parameter: Tensor) -> Any:
        is_large = isinstance(value, Tensor) and value.ndim > 0
        return Later(part, value, parameter) if is_large else part(value, parameter)

    return made


class OffloadedState:
    """Wraps an optimizer's `step` and `load_state_dict` to offload moments. A moment is a state
    value with the shape of its parameter."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        as_bf16: bool = False,
        storage_device: torch.device | None = None,
    ) -> None:
        """storage_device: device on which moments are stored between steps; None for the
        parameters' device."""
        self._optimizer = optimizer
        self._as_bf16 = as_bf16
        self._storage_device = storage_device
        self._buffers: dict[tuple[Tensor, str], Tensor] = {}
        self._step, self._load = optimizer.step, optimizer.load_state_dict
        optimizer.step = self.step  # type: ignore[method-assign,assignment]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign,assignment]

    def step(self) -> None:
        """Perform an optimizer step, bucket by bucket."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            for bucket in self._buckets():
                self._fetch(bucket)
                own = set(bucket)
                parts = [
                    {**options, "params": [each for each in options["params"] if each in own]}
                    for options in before
                ]
                self._optimizer.param_groups = [part for part in parts if part["params"]]
                self._step()
                self._offload(bucket)
                for group, part in zip(groups, parts, strict=True):
                    if part["params"]:  # keep values that the optimizer has stored in the group
                        group.update({**part, "params": group["params"]})
        finally:
            self._optimizer.param_groups = groups
        groups[0][NUM_STEPS] = self._num_steps + 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state as the optimizer's own method does, except that values can be `Later`. Each
        moment is offloaded before the next is computed, because all moments together might exceed
        the device's memory."""
        parameters = self._parameters()
        later = [
            (at, name, value)
            for at, values in state["state"].items()
            for name, value in values.items()
            if isinstance(value, Later)
        ]
        rest = {at: dict(values) for at, values in state["state"].items()}
        for at, name, _ in later:
            rest[at][name] = None
        self._load({**state, "state": rest})
        for at, name, value in later:
            self._keep(parameters[at], name, value.now())

    @property
    def _num_steps(self) -> int:
        return int(self._optimizer.param_groups[0].get(NUM_STEPS, 0))

    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        size = 0
        for parameter in self._parameters():
            own = local(parameter)
            if bucket and size + own.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += own.nbytes
        if bucket:
            yield bucket

    def _fetch(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            for name, value in self._moments(parameter):
                here = _plain(value).to(local(parameter))
                self._optimizer.state[parameter][name] = like(here, parameter)

    def _offload(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            for name, value in self._moments(parameter):
                self._keep(parameter, name, value)

    def _keep(self, parameter: Tensor, name: str, value: Tensor | Apart) -> None:
        state, here = self._optimizer.state[parameter], _plain(value)
        if not _is_moment(value, parameter):
            state[name] = here.to(local(parameter))
            return
        buffer = self._buffer(parameter, name)
        buffer.copy_(rounded(here, self._num_steps) if self._as_bf16 else here)
        if self._storage_device is None:
            state[name] = like(buffer, parameter)
        else:
            state[name] = Apart(buffer, parameter) if isinstance(parameter, DTensor) else buffer

    def _moments(self, parameter: Tensor) -> list[tuple[str, Tensor | Apart]]:
        """Return the values in a parameter's state that have the shape of the parameter."""
        state = self._optimizer.state.get(parameter, {})
        return [(name, value) for name, value in state.items() if _is_moment(value, parameter)]

    def _buffer(self, parameter: Tensor, name: str) -> Tensor:
        key = (parameter, name)
        if key not in self._buffers:
            own = local(parameter)
            device = self._storage_device or own.device
            self._buffers[key] = torch.empty(
                own.shape,
                dtype=torch.bfloat16 if self._as_bf16 else own.dtype,
                device=device,
                pin_memory=on_gpu(own) and not is_gpu(device),
            )
        return self._buffers[key]


def _plain(value: Tensor | Apart) -> Tensor:
    return value.part if isinstance(value, Apart) else local(value)


def _is_moment(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor | Apart):
        return False
    part = _plain(value)
    return part.ndim > 0 and part.shape == local(parameter).shape


def rounded(values: Tensor, number: int) -> Tensor:
    """Round to bf16 stochastically: the probability of rounding up is the truncated fraction (as in
    arXiv:2010.06192). With this rounding, small changes accumulate. With rounding to nearest, a
    moment that decays by a thousandth in each step would never change.

    The pseudo-random numbers depend only on the bits of the values, their positions and the step.
    Therefore, ranks with the same values round in the same way, even after a resume.
    """
    bits = values.float().view(torch.int32)
    indices = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).view_as(bits)
    chances = _mixed(_mixed(bits + number) + indices) & 0xFFFF
    cut = ((bits + chances) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)


def _mixed(bits: Tensor) -> Tensor:
    """Hash each number (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB), (16, 1)):
        bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * factor
    return bits
