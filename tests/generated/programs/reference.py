"""`dray.train` for one pass of a program, with torch only: its DDP, or gradients averaged by hand.

DDP refuses some programs, or leaves their ranks with different weights, for example if a parameter
is unfrozen after it was wrapped. By hand, each backward pass averages its new gradients, weighted
by the samples of each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class ReferenceTrain:
    """The calls that programs make."""

    def __init__(self, *, uses_ddp: bool = True) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._uses_ddp = uses_ddp and self._world_size > 1
        self._models: list[nn.Module] = []
        self._wrapped: list[DistributedDataParallel] = []
        self._local: dict[int, Tensor] = {}
        """Accumulated gradients that are not averaged yet, by parameter."""
        self._weight = 1.0 / self._world_size
        self._is_synchronous = True
        self._epoch = self._batch = 0
        self._next_epoch = 0
        self._steps = 0

    def init(self, *, seed: int, **_: Any) -> None:
        torch.manual_seed(seed)
        if self._world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")

    def prepare(
        self,
        models: Any,
        optimizers: Any,
        loader: Any = None,
        *,
        broadcast_buffers: bool = True,
        **_: Any,
    ) -> tuple[Any, Any, Any]:
        several = isinstance(models, list)
        given = models if several else [models]
        for optimizer in optimizers if several else [optimizers]:
            optimizer.register_step_post_hook(self._stepped)
        self._models += given
        if self._uses_ddp:
            given = [
                DistributedDataParallel(
                    model,
                    find_unused_parameters=True,
                    broadcast_buffers=broadcast_buffers,
                    process_group=dist.new_group(),
                )
                for model in given
            ]
            self._wrapped += given
        prepared = None if loader is None else _Shares(self, loader)
        return given if several else given[0], optimizers, prepared

    def _stepped(self, *_: Any) -> None:
        self._steps += 1

    def epochs(self, number: int) -> Iterator[int]:
        yield from range(self._next_epoch, number)

    def resumed(self, epoch: int) -> int:
        """Make the next pass of the loader yield this epoch; returns it."""
        self._next_epoch = epoch
        return epoch

    def progress(self) -> Any:
        return SimpleNamespace(epoch=self._epoch, batch=self._batch, step=self._steps)

    def report(self, values: dict[str, float]) -> None:
        pass

    def shares(self, loader: Any) -> Iterator[Any]:
        """Yield this rank's share of each batch."""
        self._epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        sampler = loader.batch_sampler
        if hasattr(sampler.sampler, "set_epoch"):
            sampler.sampler.set_epoch(self._epoch)
        for self._batch, whole in enumerate(list(sampler)):
            first = len(whole) * self._rank // self._world_size
            last = len(whole) * (self._rank + 1) // self._world_size
            self._weight = (last - first) / len(whole)
            yield loader.dataset[whole[first:last]]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_synchronous = False
        with ExitStack() as stack:
            for model in self._wrapped:
                stack.enter_context(model.no_sync())
            yield
        self._is_synchronous = True

    def backward(self, loss: Tensor, **how: Any) -> None:
        if self._world_size == 1:
            torch.autograd.backward(loss, **how)
        elif self._uses_ddp:
            torch.autograd.backward(loss * self._weight * self._world_size, **how)
        else:
            self._average_by_hand(loss, **how)

    def _average_by_hand(self, loss: Tensor, **how: Any) -> None:
        """Add the averages of the new gradients to the earlier gradients."""
        parameters = list(dict.fromkeys(p for model in self._models for p in model.parameters()))
        before = {id(p): p.grad for p in parameters}
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(loss, **how)
        for parameter in parameters:
            new, old = parameter.grad, before[id(parameter)]
            if new is not None:
                new = new * self._weight + self._local.pop(id(parameter), 0.0)
                if self._is_synchronous:
                    dist.all_reduce(new)
                else:
                    self._local[id(parameter)], new = new, None
            parameter.grad = old if new is None else new if old is None else old + new


class _Shares:
    def __init__(self, train: ReferenceTrain, loader: Any) -> None:
        self._train, self._loader = train, loader

    def __iter__(self) -> Iterator[Any]:
        return self._train.shares(self._loader)
