"""Measuring a model on the validation split, each rank its share."""

from __future__ import annotations

from collections.abc import Callable
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
        self.share(0, 1)

    def share(self, rank: int, world_size: int) -> None:
        """Measure this rank's share of the samples from now on, and nothing of an evaluation that
        broke off."""
        self._start, self._stop = share(len(self._samples), rank, world_size)
        self._world_size = world_size
        self._metrics = self._fresh_metrics().to(self._device)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """`val/loss` and the recipe's metrics over all ranks' shares, the same on every rank.

        A collective: all ranks call it together.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for at in self._batches():
                    loss += self._take_batch(model, at)
        finally:
            model.train(was_training)
        process_group.add_up(loss, self._world_size)
        found = {"val/loss": loss.item() / len(self._samples)}
        found |= {f"val/{name}": float(value) for name, value in self._metrics.compute().items()}
        self._metrics.reset()
        return found

    def _take_batch(self, model: nn.Module, at: torch.Tensor) -> torch.Tensor:
        """Have the metrics take some samples; the sum of their losses."""
        inputs, targets = self._samples.take(at)
        with self._autocast():
            outputs = model(inputs)
        # A rank without a share has the metrics take nothing, but in its right shape.
        count = len(at) if self._start < self._stop else 0
        outputs, targets = outputs[:count].float(), targets[:count]
        self._metrics.update(outputs, targets)
        return self._loss_sum(outputs, targets).double()

    def _batches(self) -> list[torch.Tensor]:
        """Sample numbers of this rank's share; the first sample's for a rank without one."""
        stop = self._stop if self._start < self._stop else self._start + 1
        numbers = torch.arange(self._start, stop).clamp_(max=len(self._samples) - 1)
        return list(torch.split(numbers, self._batch_size))
