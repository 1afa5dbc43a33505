"""One server's rows of all values, as a state machine that computes the responses to messages,
without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

Answers = list[tuple[int, Tensor | None]]
"""(worker, value) for each waiting worker whose response is ready. The value is None for a worker
that waited at a barrier."""
DENSE: Final[Mapping[str, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}
SPARSE: Final[Mapping[str, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.SparseAdam,
    "adagrad": torch.optim.Adagrad,
}
"""Optimizers that change only the rows of a sparse gradient."""


class KVError(Exception):
    """A call that the servers refuse."""


class KeyValueShard:
    """The values of one server. With `is_synchronous`, pushes to a key are applied once all workers
    have pushed it, and a pull waits until its worker's pushes have been applied."""

    def __init__(self, num_workers: int, *, is_synchronous: bool) -> None:
        self._num_workers = num_workers
        self._is_synchronous = is_synchronous
        self._values: dict[str, Tensor] = {}
        self._pushed: dict[str, dict[int, Tensor]] = {}
        self._num_pushed: Counter[tuple[str, int]] = Counter()
        self._num_applied: Counter[str] = Counter()
        self._waiting: list[tuple[int, str, Tensor | None]] = []
        self._at_barrier: list[int] = []
        self._optimizer: tuple[str, Mapping[str, Any]] | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def init(self, key: str, value: Tensor) -> None:
        """Set the value of a key that has no value yet."""
        self._values.setdefault(key, value.clone())

    def set_optimizer(self, name: str, options: Mapping[str, Any]) -> None:
        """Treat all further pushes as gradients for this optimizer."""
        if name not in DENSE:
            raise KVError(f"unknown optimizer {name!r}: use {', '.join(DENSE)}")
        self._optimizer = (name, dict(options))
        self._optimizers.clear()

    def push(self, worker: int, key: str, gradient: Tensor) -> Answers:
        """Push a gradient, which must be dense or row-sparse."""
        self._value(key)
        if not self._is_synchronous:
            self._apply(key, gradient)
            return []
        pushed = self._pushed.setdefault(key, {})
        if worker in pushed:
            raise KVError(
                f"{key!r} was pushed twice before all workers had pushed it once: pull the key "
                "after each push"
            )
        pushed[worker] = gradient
        self._num_pushed[key, worker] += 1
        if len(pushed) < self._num_workers:
            return []
        first, *others = [pushed[each] for each in sorted(pushed)]
        for other in others:
            first = first + other
        pushed.clear()
        self._apply(key, first)
        self._num_applied[key] += 1
        return self._answers()

    def pull(self, worker: int, key: str, rows: Tensor | None = None) -> Answers:
        """Pull the value of a key. rows: the rows to return; None for all rows."""
        self._value(key)
        self._waiting.append((worker, key, rows))
        return self._answers()

    def barrier(self, worker: int) -> Answers:
        """Once all workers have arrived, return a response for each of them."""
        self._at_barrier.append(worker)
        if len(self._at_barrier) < self._num_workers:
            return []
        there, self._at_barrier = self._at_barrier, []
        return [(each, None) for each in there]

    def _answers(self) -> Answers:
        found: Answers = []
        waiting = []
        for worker, key, rows in self._waiting:
            if self._num_pushed[key, worker] > self._num_applied[key]:
                waiting.append((worker, key, rows))
            else:
                value = self._values[key]
                found.append((worker, (value if rows is None else value[rows]).detach().clone()))
        self._waiting = waiting
        return found

    def _value(self, key: str) -> Tensor:
        try:
            return self._values[key]
        except KeyError:
            raise KVError(f"{key!r} has no value: call init() with this key first") from None

    @torch.no_grad()
    def _apply(self, key: str, gradient: Tensor) -> None:
        value = self._value(key)
        if self._optimizer is None:  # as in MXNet, the sum of the pushes is the new value
            if gradient.is_sparse:
                rows = gradient.coalesce()
                value[rows.indices()[0]] = rows.values()
            else:
                value.copy_(gradient)
            return
        if key not in self._optimizers:
            self._optimizers[key] = self._optimizer_of(value, is_sparse=gradient.is_sparse)
        value.grad = gradient
        self._optimizers[key].step()
        value.grad = None

    def _optimizer_of(self, value: Tensor, *, is_sparse: bool) -> torch.optim.Optimizer:
        assert self._optimizer is not None
        name, options = self._optimizer
        known = SPARSE if is_sparse else DENSE
        if name not in known:
            raise KVError(f"{name} does not support row-sparse gradients: use {', '.join(known)}")
        return known[name]([value], **options)
