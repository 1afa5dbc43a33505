"""Evaluates a model on the validation samples of each client of a federated job."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ray_workers.training.core.workload import at_least_float32
from ray_workers.training.data.sampler import share
from ray_workers.training.elastic import process_group
from ray_workers.training.loop.evaluation import Evaluation
from ray_workers.training.parallel import DataPart, Strategy, StrategyContext
from ray_workers.training.parallel.strategy import Numbers

ClientBatch = list[tuple[int, Tensor]]
"""Clients, each with the indices of some of its samples."""
SAMPLES_AT_ONCE = 256
"""Maximum total number of samples of the clients that are evaluated together."""


def evaluation_of(given: StrategyContext, strategy: Strategy) -> Evaluation:
    """Return the evaluation for this kind of job."""
    kind = Evaluation if strategy.clients is None else ClientEvaluation
    parts = (given.workload, given.device, strategy, given.autocast, given.spec.train)
    return kind(*parts, moved=given.page.move)


class ClientEvaluation(Evaluation):
    """In addition to `val/loss` and the recipe's metrics, in which all samples have the same
    weight, computes the mean over the worst tenth of the clients: `val/worst_tenth_loss`, and for
    classification also `val/worst_tenth_accuracy`.

    Each client is evaluated by one rank, and always in a batch with the same other clients,
    regardless of the number of ranks.
    """

    def take(self, part: DataPart, world_size: int) -> None:
        super().take(part, world_size)
        clients = self._strategy.clients
        assert clients is not None
        self._sizes = torch.tensor([len(numbers) for numbers in clients])
        self._has_labels = self._strategy.given.workload.validation.labels is not None
        groups = _together([at for at, numbers in enumerate(clients) if len(numbers)], clients)
        own = groups[slice(*share(len(groups), part.shares.start, part.num_shares))]
        self._own = [batch for group in own for batch in _batches(group, clients)]

    def measure(self, step: int) -> dict[str, float]:
        # Each row contains the sum of a client's losses and the client's number of correct
        # predictions. For each client, only one rank has non-zero values, so the sum over the ranks
        # is exact.
        found = torch.zeros(len(self._sizes), 2, dtype=torch.float64, device=self._device)
        with torch.no_grad(), self._strategy.judging():
            for batch in self._own:
                self._measure_batch(batch, found)
        process_group.add_up(found, self._world_size)
        sums = found.cpu()
        has_samples = self._sizes > 0
        means = sums[has_samples] / self._sizes[has_samples, None]
        measured = {
            "val/loss": float(sums[:, 0].sum()) / len(self._samples),
            "val/worst_tenth_loss": -_worst_tenth(-means[:, 0]),
        }
        if self._has_labels:
            measured["val/worst_tenth_accuracy"] = _worst_tenth(means[:, 1])
        return measured | self._measured_metrics()

    def _measure_batch(self, batch: ClientBatch, found: Tensor) -> None:
        """Add the losses of the samples and the number of correct predictions to the rows of their
        clients."""
        self._moved()
        inputs, targets = self._samples.take(torch.cat([numbers for _, numbers in batch]))
        with self._autocast():
            outputs = self._strategy.predict(inputs)
        assert outputs is not None
        outputs = at_least_float32(outputs)
        self._metrics.update(outputs, targets)
        sizes = [len(numbers) for _, numbers in batch]
        parts = zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True)
        for (at, _), (own, wanted) in zip(batch, parts, strict=True):
            found[at, 0] += self._loss_sum(own, wanted)
            if self._has_labels:
                found[at, 1] += (own.argmax(dim=1) == wanted).sum()


def _together(clients: Sequence[int], numbers: Sequence[Numbers]) -> list[list[int]]:
    """Group clients that are evaluated together; a client with many samples has its own group."""
    groups: list[list[int]] = []
    size = 0
    for at in clients:
        if not groups or size + len(numbers[at]) > SAMPLES_AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(at)
        size += len(numbers[at])
    return groups


def _batches(group: Sequence[int], numbers: Sequence[Numbers]) -> list[ClientBatch]:
    if len(group) > 1:
        return [[(at, torch.from_numpy(numbers[at])) for at in group]]
    (alone,) = group
    pieces = torch.split(torch.from_numpy(numbers[alone]), SAMPLES_AT_ONCE)
    return [[(alone, piece)] for piece in pieces]


def _worst_tenth(values: Tensor) -> float:
    """Return the mean of the lowest tenth of the values (at least one value)."""
    count = math.ceil(len(values) / 10)
    return float(values.sort().values[:count].mean())
