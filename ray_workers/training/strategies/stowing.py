"""Optimizer state that lies in fewer bits, or in the host's memory, between the steps.

The optimizer does its step as ever, in fp32 on the device of the parameters, but of a bucket of
parameters at a time: what those need is fetched before, and stowed away after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_workers.training.dtensors import like, local

BUCKET_BYTES = 64 << 20
"""Of the parameters whose state is fetched together; at least one parameter."""
NUM_STEPS = "stowed"
"""Option of the first group: how often it was stepped, which a checkpoint keeps."""


class Stowed:
    """Takes an optimizer's `step` over; moments as large as their parameter are stowed."""

    def __init__(
        self, optimizer: Optimizer, *, as_bf16: bool = False, home: torch.device | None = None
    ) -> None:
        """home: where they lie; None for where the parameters do."""
        self._optimizer = optimizer
        self._as_bf16 = as_bf16
        self._home = home
        self._places: dict[tuple[Tensor, str], Tensor] = {}
        self._step = optimizer.step
        optimizer.step = self.step  # type: ignore[method-assign,assignment]

    def step(self) -> None:
        """One optimizer step, bucket by bucket."""
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
                self._stow(bucket)
                for group, part in zip(groups, parts, strict=True):
                    if part["params"]:  # what the optimizer remembers of a group
                        group.update({**part, "params": group["params"]})
        finally:
            self._optimizer.param_groups = groups
        groups[0][NUM_STEPS] = self._num_steps + 1

    def stow(self) -> None:
        """Stow everything that was just loaded."""
        self._stow(self._parameters())

    @property
    def _num_steps(self) -> int:
        return int(self._optimizer.param_groups[0].get(NUM_STEPS, 0))

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """While the state is read as torch has it: parts of what is sharded know what they are."""
        is_apart = self._home is not None and any(
            isinstance(each, DTensor) for each in self._parameters()
        )
        if not is_apart:
            yield
            return
        self._fetch(self._parameters())
        try:
            yield
        finally:
            self._stow(self._parameters())

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
                here = local(value).to(local(parameter))
                self._optimizer.state[parameter][name] = like(here, parameter)

    def _stow(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            for name, value in self._moments(parameter):
                place = self._place(parameter, name)
                here = local(value)
                place.copy_(rounded(here, self._num_steps) if self._as_bf16 else here)
                apart = self._home is not None
                self._optimizer.state[parameter][name] = place if apart else like(place, parameter)

    def _moments(self, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """Of its state what is as large as it is."""
        state = self._optimizer.state.get(parameter, {})
        shape = local(parameter).shape
        return [
            (name, value)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.ndim and local(value).shape == shape
        ]

    def _place(self, parameter: Tensor, name: str) -> Tensor:
        key = (parameter, name)
        if key not in self._places:
            own = local(parameter)
            device = self._home or own.device
            self._places[key] = torch.empty(
                own.shape,
                dtype=torch.bfloat16 if self._as_bf16 else own.dtype,
                device=device,
                pin_memory=device.type == "cpu" and own.is_cuda,
            )
        return self._places[key]


def rounded(values: Tensor, number: int) -> Tensor:
    """To bf16, up with a chance of what is cut off, so that many small changes add up: a moment
    that decays by a thousandth in each step would stand still (stochastic rounding, as in
    arXiv:2010.06192).

    Drawn from the numbers' own bits, their places and that of the step: who has the same numbers
    rounds alike, now and after a resume.
    """
    bits = values.float().view(torch.int32)
    places = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).view_as(bits)
    chances = _mixed(_mixed(bits + number) + places) & 0xFFFF
    cut = ((bits + chances) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)


def _mixed(bits: Tensor) -> Tensor:
    """Of each number one that looks drawn by chance (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB), (16, 1)):
        bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * factor
    return bits
