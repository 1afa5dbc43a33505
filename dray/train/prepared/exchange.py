"""Exchanges gradients: averages them over the global batch at the end of a backward pass.

All gradients of a model that have the same data type are sent as one flat tensor. The tensor also
contains rank 0's buffers (as in DDP), a number that marks the point that the rank's script has
reached, and flags for the parameters that have new gradients on the rank. If no rank's backward
pass reached a parameter, the gradient of the parameter does not change. With several models, the
ranks first agree on which models the backward pass reached, and send only the gradients of these
models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_MARKS = 2
_SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class GradientExchange:
    """Averages the gradients of the models, and of parameters that belong to no model."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        others: Sequence[nn.Parameter] = (),
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        """others: optimizer parameters that do not belong to any of the models."""
        self._broadcasts = broadcast_buffers
        self._sections: list[_Section] = []
        self._known: set[int] = set()
        self._prepared: list[tuple[nn.Module, dict[str, Tensor]]] = []
        """Each model, with the parameters that it had when it was added, keyed by name."""
        self._registries: list[Mapping[str, Any]] = []
        """The parameters and submodules of every module of the models."""
        self._registered: list[int] = []
        """The ids of the values in `_registries`, in order."""
        self._reached: set[int] = set()
        """Ids of the parameters for which a gradient was computed since the last exchange."""
        for model in models:
            self.add(model)
        self.add_others(others)

    def add(self, model: nn.Module) -> None:
        """Also exchange the gradients of another model."""
        self._prepared.append((model, dict(model.named_parameters())))
        for module in model.modules():
            self._registries += [module._parameters, module._modules]
        self._registered = self._registered_now()
        parameters = self._new(model.parameters())
        buffers = self._new(model.buffers())
        self._sections.append(_Section(parameters, buffers, sends_buffers=self._broadcasts))

    def add_others(self, parameters: Sequence[nn.Parameter]) -> None:
        """Exchange the gradients of parameters that belong to no model."""
        if own := self._new(parameters):
            self._sections.append(_Section(own, [], sends_buffers=False))

    def _new(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        own = [each for each in dict.fromkeys(tensors) if id(each) not in self._known]
        self._known.update(map(id, own))
        return own

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all models, including frozen ones, without duplicates."""
        return [parameter for section in self._sections for parameter in section.parameters]

    @property
    def late_parameters(self) -> list[str]:
        """The names of the parameters that the script has added to the models, or replaced, since
        `add`."""
        if self._registered_now() == self._registered:  # fast, for every batch
            return []
        return [
            name
            for model, prepared in self._prepared
            for name, parameter in model.named_parameters()
            if not (name in prepared and _is_same(prepared[name], parameter))
        ]

    def _registered_now(self) -> list[int]:
        values = itertools.chain.from_iterable(each.values() for each in self._registries)
        return list(map(id, values))

    def is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def reached(self, parameter: Tensor) -> None:
        """Record that a backward pass has computed a gradient of the parameter."""
        self._reached.add(id(parameter))

    def reached_any(self, parameters: Iterable[Tensor]) -> bool:
        return any(id(parameter) in self._reached for parameter in parameters)

    @torch.no_grad()
    def run(self, weight: float, rank: int, mark: int) -> list[Tensor]:
        """Return the weighted sum of the ranks' gradients, as flat tensors. A collective, which
        does not change the gradients themselves.

        mark: a number below 2**32 that identifies the point that the script has reached; see
        `has_mark`. Raises ValueError if the tensors are on several devices.
        """
        devices = {str(one.device) for one in (*self.parameters, *self._buffers)}
        if len(devices) > 1:
            raise ValueError(
                f"the models given to prepare() are on {' and '.join(sorted(devices))}: move all "
                "of them to the rank's GPU, or train with one worker"
            )
        marks = [float(mark % 2**16), float(mark >> 16)]
        if len(self._sections) == 1:
            return self._sections[0].run(self._reached, weight, rank, marks)
        own = [float(self._is_due(section)) for section in self._sections]
        reached = torch.tensor([*marks, *own], device=self.device)
        dist.all_reduce(reached)
        flats = [reached]
        for section in self._reached_sections(reached):
            flats += section.run(self._reached, weight, rank, [])
        return flats

    def _is_due(self, section: _Section) -> bool:
        """Whether a backward pass has reached parameters of the section, or buffers of the section
        have changed."""
        return section.has_new_buffers() or self.reached_any(section.parameters)

    @property
    def has_new_buffers(self) -> bool:
        """Whether buffers have changed since the last exchange, so that they may differ between
        ranks."""
        return any(section.has_new_buffers() for section in self._sections)

    def has_mark(self, flats: Sequence[Tensor], mark: int, world_size: int) -> bool:
        """Whether all ranks have entered the exchange with this mark. The mark is sent as two
        16-bit numbers, whose sums over up to 256 ranks are exact in fp32."""
        sums = flats[0][:2].tolist()
        return bool(sums == [world_size * (mark % 2**16), world_size * (mark >> 16)])

    def _reached_sections(self, reached: Tensor) -> list[_Section]:
        numbers = reached.tolist()[NUM_MARKS:]
        return [one for one, number in zip(self._sections, numbers, strict=True) if number]

    @torch.no_grad()
    def apply(self, flats: Sequence[Tensor]) -> None:
        """Set the gradients of the parameters to the averages over the global batch. Buffers get
        rank 0's values later, in `settle_buffers`, because the graph of another pass may still need
        the old values."""
        remaining = iter(flats)
        sections = self._sections
        if len(sections) > 1:
            sections = self._reached_sections(next(remaining))
        num_marks = NUM_MARKS if len(self._sections) == 1 else 0
        for section in sections:
            section.pending = section.apply(remaining, num_marks)

    def is_done(self) -> None:
        """Record that the exchange has ended, so that later gradients count as new."""
        self._reached.clear()
        for section in self._sections:
            section.note_buffers()

    @torch.no_grad()
    def settle_buffers(self) -> None:
        """Copy the values received from rank 0 into the buffers."""
        for section in self._sections:
            for buffer, value in section.pending:
                buffer.copy_(value)
            if section.pending:
                section.note_buffers()
        self.drop_pending()

    def drop_pending(self) -> None:
        """Discard rank 0's values, and leave the buffers unchanged."""
        for section in self._sections:
            section.pending = []

    def gradients(
        self, chosen: Iterable[Tensor] | None = None, *, in_host_memory: bool = False
    ) -> list[Tensor | None]:
        """Return copies of the gradients of all parameters, or only of the `chosen` parameters. The
        entry of a parameter that is not chosen or has no gradient is None."""
        ids = None if chosen is None else set(map(id, chosen))
        return [
            p.grad.to("cpu" if in_host_memory else p.grad.device, copy=True)
            if p.grad is not None and (ids is None or id(p) in ids)
            else None
            for p in self.parameters
        ]

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            copied = None if gradient is None else gradient.to(parameter.device, copy=True)
            parameter.grad = copied

    def set_which_have_gradients(self, has_gradients: Sequence[bool]) -> None:
        """Remove the gradients of parameters that should have none, and set missing gradients to
        zeros."""
        for parameter, has_gradient in zip(self.parameters, has_gradients, strict=False):
            if not has_gradient:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def zero_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def buffers(self) -> list[Tensor]:
        """Return copies of the buffers."""
        return [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def set_buffers(self, buffers: Sequence[Tensor]) -> None:
        self.drop_pending()
        for buffer, value in zip(self._buffers, buffers, strict=False):
            buffer.copy_(value)
        for section in self._sections:
            section.note_buffers()

    @property
    def _buffers(self) -> list[Tensor]:
        return [buffer for section in self._sections for buffer in section.buffers]


class _Section:
    """The parameters and buffers of a model."""

    def __init__(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], *, sends_buffers: bool
    ) -> None:
        self.parameters = parameters
        self.buffers = buffers
        self.pending: list[tuple[Tensor, Tensor]] = []
        """Pairs of a buffer and the value of rank 0 that will be copied to it."""
        self._sent = buffers if sends_buffers else []
        self.note_buffers()

    def note_buffers(self) -> None:
        """Record that the current values of the buffers need not be sent, because all ranks have
        these values or will receive them."""
        self._versions = [buffer._version for buffer in self._sent]

    def has_new_buffers(self) -> bool:
        return self._versions != [buffer._version for buffer in self._sent]

    def run(
        self, reached: set[int], weight: float, rank: int, marks: Sequence[float]
    ) -> list[Tensor]:
        """See `GradientExchange.run`."""
        flats = []
        for dtype, (parameters, buffers) in self._by_type().items():
            sizes = self._sizes(dtype, parameters, buffers, len(marks))
            flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            parts = iter(torch.split(flat, sizes))
            if dtype is torch.float32:
                next(parts).copy_(self._presence(reached, marks))
            for parameter in parameters:
                part = next(parts)
                if parameter.grad is None:
                    part.zero_()
                else:
                    torch.mul(parameter.grad.reshape(-1), weight, out=part)
            for buffer in buffers:
                part = next(parts)
                _ = part.copy_(buffer.reshape(-1)) if rank == 0 else part.zero_()
            flats.append(flat)
        if plain := self._plain():
            flat = torch.cat([_bytes_of(buffer) for buffer in plain])
            flats.append(flat if rank == 0 else torch.zeros_like(flat))
        for flat in flats:
            dist.all_reduce(flat)
        return flats

    def apply(self, flats: Iterator[Tensor], num_marks: int) -> list[tuple[Tensor, Tensor]]:
        """See `GradientExchange.apply`. Returns each buffer paired with its value on rank 0."""
        has_one: dict[int, float] = {}
        pending: list[tuple[Tensor, Tensor]] = []
        for dtype, (parameters, buffers) in self._by_type().items():
            sizes = self._sizes(dtype, parameters, buffers, num_marks)
            parts = iter(torch.split(next(flats), sizes))
            if dtype is torch.float32:
                presence = next(parts).tolist()[num_marks:]
                has_one = dict(zip(map(id, self._trained()), presence, strict=True))
            for parameter in parameters:
                part = next(parts).view_as(parameter)
                if not has_one[id(parameter)]:
                    continue
                if parameter.grad is None:
                    parameter.grad = part.clone()
                else:
                    parameter.grad.copy_(part)
            pending += [(buffer, next(parts).view_as(buffer)) for buffer in buffers]
        if plain := self._plain():
            sizes = [buffer.nbytes for buffer in plain]
            for buffer, part in zip(plain, torch.split(next(flats), sizes), strict=True):
                pending.append((buffer, part.clone().view(buffer.dtype).view_as(buffer)))
        return pending

    def _trained(self) -> list[Tensor]:
        """Return the parameters that are not frozen. A program can freeze and unfreeze parameters
        at any time, if all ranks do the same."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @property
    def _device(self) -> torch.device:
        return (*self.parameters, *self.buffers)[0].device

    def _by_type(self) -> dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]:
        """Return the parameters, and the buffers that are sent with them, grouped by type."""
        # Flags for new gradients are sent as float32, regardless of the type of the gradients.
        found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {torch.float32: ([], [])}
        for parameter in self._trained():
            found.setdefault(parameter.dtype, ([], []))[0].append(parameter)
        for buffer in self._sent:
            if _is_summed(buffer, found):
                found[buffer.dtype][1].append(buffer)
        return found

    def _plain(self) -> list[Tensor]:
        """Return the buffers that are sent as bytes."""
        types = {torch.float32, *(parameter.dtype for parameter in self._trained())}
        return [buffer for buffer in self._sent if not _is_summed(buffer, types)]

    def _sizes(
        self,
        dtype: torch.dtype,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        num_marks: int,
    ) -> list[int]:
        """Return the number of elements of each part of the flat tensor of a data type."""
        own = [each.numel() for each in (*parameters, *buffers)]
        return [num_marks + len(self._trained()), *own] if dtype is torch.float32 else own

    def _presence(self, reached: set[int], marks: Sequence[float]) -> Tensor:
        trained = self._trained()
        for parameter in trained:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ValueError("prepare() does not exchange sparse gradients: use sparse=False")
        has_one = [float(id(p) in reached and p.grad is not None) for p in trained]
        return torch.tensor([*marks, *has_one], dtype=torch.float32, device=self._device)


def _is_summed(buffer: Tensor, types: Iterable[torch.dtype]) -> bool:
    return buffer.dtype in types and buffer.dtype in _SUMMED


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class SampleCount:
    """Counts the samples of the current batch, and of the batches in the next exchange."""

    def __init__(self) -> None:
        self._at_hand = (0, 0)
        """Numbers of samples in the current batch, on this rank and on all ranks."""
        self._counted = self._num_global = 0
        """Numbers of samples in the batches of the next exchange, on this rank and on all ranks."""
        self._is_counted = False
        """Whether the current batch had a backward pass, so that the next exchange includes the
        batch."""
        self.has_exchanged = True
        """Whether no backward pass has ended since the last exchange."""

    @property
    def num_global(self) -> int:
        return self._num_global

    def begin(self, counted: int, num_global: int) -> None:
        """Begin a batch with these numbers of samples on this rank and on all ranks."""
        self._at_hand, self._is_counted = (counted, num_global), False

    def passed(self) -> None:
        """Record the end of a backward pass. The next exchange includes the current batch, alone or
        together with earlier batches whose gradients were accumulated."""
        counted, num_global = self._at_hand
        if self.has_exchanged:
            self._counted, self._num_global = counted, num_global
        elif not self._is_counted:
            self._counted += counted
            self._num_global += num_global
        self._is_counted, self.has_exchanged = True, False

    def weight(self, world_size: int) -> float:
        """Return this rank's fraction of the samples. Without a loader, all ranks have the same
        fraction."""
        return self._counted / self._num_global if self._num_global else 1.0 / world_size


def _is_same(prepared: Tensor, parameter: Tensor) -> bool:
    """Whether a model still has this parameter. FSDP registers another tensor while the parameter
    is gathered."""
    return parameter is prepared or hasattr(prepared, "_local_tensor")
