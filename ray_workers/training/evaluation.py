"""Measuring a model on the validation split, each rank its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ray_workers.training import process_group
from ray_workers.training.data import share
from ray_workers.training.samples import DistantSamples, ResidentSamples, on_device
from ray_workers.training.workload import Workload


class Evaluation:
    """Measures one workload's models, time after time."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[object]],
        batch_size: int,
    ) -> None:
        self._samples: ResidentSamples | DistantSamples = on_device(workload.validation, device)
        self._loss_sum = workload.validation_loss_sum
        self._fresh_metrics = workload.metrics
        self._device = device
        self._autocast = autocast
        self._batch_size = batch_size
        self.share([0], 1, 1)

    def share(self, shares: Sequence[int], num_shares: int, world_size: int) -> None:
        """Measure these shares of the samples from now on, and nothing of an evaluation that
        broke off."""
        self._shares, self._num_shares = shares, num_shares
        self._world_size = world_size
        self._metrics = self._fresh_metrics().to(self._device)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """`val/loss` and the recipe's metrics over all ranks' shares, the same on every rank.

        A collective: all ranks call it together.
        """
        # Of each share by itself, so that their sum does not depend on who measured which.
        losses = torch.zeros(self._num_shares, dtype=torch.float64, device=self._device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for number in self._shares:
                    losses[number] = self._measure_share(model, number)
        finally:
            model.train(was_training)
        process_group.add_up(losses, self._world_size)
        found = {"val/loss": losses.sum().item() / len(self._samples)}
        found |= {f"val/{name}": float(value) for name, value in self._metrics.compute().items()}
        self._metrics.reset()
        return found

    def _measure_share(self, model: nn.Module, number: int) -> torch.Tensor:
        """Have the metrics take the samples of a share; the sum of their losses."""
        start, stop = share(len(self._samples), number, self._num_shares)
        counts = stop > start
        # Of a share without samples the metrics take nothing, but in its right shape.
        numbers = torch.arange(start, max(stop, start + 1)).clamp_(max=len(self._samples) - 1)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        batches = torch.split(numbers, self._batch_size)
        for at in batches:
            loss += self._take_batch(model, at, len(at) if counts else 0)
        # Ranks that hold a model together compute equally often.
        largest = -(-len(self._samples) // self._num_shares)
        for _ in range(-(-largest // self._batch_size) - len(batches)):
            self._take_batch(model, numbers[:1], 0)
        return loss

    def _take_batch(self, model: nn.Module, at: torch.Tensor, count: int) -> torch.Tensor:
        """Have the metrics take the first `count` of some samples; the sum of their losses."""
        inputs, targets = self._samples.take(at)
        with self._autocast():
            outputs = model(inputs)
        outputs, targets = outputs[:count].float(), targets[:count]
        self._metrics.update(outputs, targets)
        return self._loss_sum(outputs, targets).double()
