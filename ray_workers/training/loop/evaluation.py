"""Evaluates a model on the validation split; each rank evaluates its share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from dray import spec
from ray_workers.training.core.workload import Workload, at_least_float32
from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples, on_device
from ray_workers.training.data.sampler import share
from ray_workers.training.elastic import process_group
from ray_workers.training.loop.text_samples import TextSampler
from ray_workers.training.parallel import DataPart, Strategy


class Evaluation:
    """Evaluates the models of one workload repeatedly."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        strategy: Strategy,
        autocast: Callable[[], AbstractContextManager[object]],
        options: spec.Train,
        moved: Callable[[], None],
    ) -> None:
        """moved: called before each batch, so that a rank in a long evaluation is not considered
        hung."""
        self._strategy = strategy
        self._samples: InMemorySamples | MemoryMappedSamples = on_device(
            workload.validation, device
        )
        self._num_terms = workload.validation.total_terms
        self._loss_sum = workload.validation_loss_sum
        self._fresh_metrics = workload.metrics
        self._device = device
        self._autocast = autocast
        self._options = options
        self._moved = moved
        prompts = workload.prompts
        self._texts = None if prompts is None else TextSampler(prompts, strategy, autocast, moved)
        self.take(DataPart(range(1), 1), 1)

    def take(self, part: DataPart, world_size: int) -> None:
        """Evaluate this part of the samples from now on, and discard any interrupted evaluation."""
        self._part = part
        self._world_size = world_size
        share = -(-self._options.global_batch_size // part.num_shares)
        self._batch_size = self._options.micro_batch_size or share
        self._metrics = self._fresh_metrics().to(self._device)

    def measure(self, step: int) -> dict[str, float]:
        """Return `val/loss` and the recipe's metrics over the shares of all ranks. The result is
        the same on every rank. Also generate the texts of `samples`.

        A collective operation: all ranks must call it together.
        """
        # Keep one sum per share, so that the total does not depend on which rank evaluated which
        # share.
        losses = torch.zeros(self._part.num_shares, dtype=torch.float64, device=self._device)
        with torch.no_grad(), self._strategy.judging():
            for number in self._part.shares:
                losses[number] = self._measure_share(number) * self._part.weight
            if self._texts is not None:
                self._texts.sample(step, self._batch_size, self._world_size)
        process_group.add_up(losses, self._world_size)
        return {"val/loss": losses.sum().item() / self._num_terms} | self._measured_metrics()

    def _measured_metrics(self) -> dict[str, float]:
        """Compute the recipe's metrics over the updates of all ranks, and reset them. A collective
        operation."""
        with warnings.catch_warnings():
            # Don't warn about ranks that have no outputs and therefore haven't updated the metrics.
            warnings.filterwarnings("ignore", message="The ``compute`` method")
            measured = self._metrics.compute()
        self._metrics.reset()
        return {f"val/{name}": float(value) for name, value in measured.items()}

    def _measure_share(self, number: int) -> torch.Tensor:
        """Update the metrics with the samples of a share, and return the sum of the losses."""
        num_shares = self._part.num_shares
        start, stop = share(len(self._samples), number, num_shares)
        counts = stop > start
        # A rank without samples processes one sample with zero weight, because ranks that share a
        # model must compute together.
        numbers = torch.arange(start, max(stop, start + 1)).clamp_(max=len(self._samples) - 1)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        batches = torch.split(numbers, self._batch_size)
        for at in batches:
            loss += self._take_batch(at, len(at) if counts else 0)
        # Ranks that share a model must process the same number of batches.
        largest = -(-len(self._samples) // num_shares)
        for _ in range(-(-largest // self._batch_size) - len(batches)):
            self._take_batch(numbers[:1], 0)
        return loss

    def _take_batch(self, at: torch.Tensor, count: int) -> torch.Tensor:
        """Update the metrics with the first `count` samples of the batch, unless `count` is 0,
        because most metrics do not support empty batches. Return the sum of the losses."""
        self._moved()
        inputs, targets = self._strategy.narrowed(self._samples.take(at))
        with self._autocast():
            outputs = self._strategy.predict(inputs)
        if outputs is None or count == 0 or not self._part.weight:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        outputs, targets = at_least_float32(outputs[:count]), targets[:count]
        self._metrics.update(outputs, targets)
        return self._loss_sum(outputs, targets).double()
