"""A typical plain DDP loop for torchrun, without schedule, metrics and reports."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from dray.spec import Train
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.parallel.meta_init import materialise


class PlainLoop:
    """A loop with the same model, data, batch size and optimizer as the job. The optimizer is
    fused, like dray's."""

    def __init__(self, workload: Workload, options: Train) -> None:
        self._samples = on_device(workload.train, torch.device("cpu"))
        self._batch_size = options.global_batch_size
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._generator = torch.Generator().manual_seed(options.seed)
        materialise(workload.model, torch.device("cpu"), options.seed)
        self._model = DistributedDataParallel(workload.model, gradient_as_bucket_view=True)
        adamw = options.optimizer
        self._optimizer = AdamW(
            self._model.parameters(), lr=adamw.lr, weight_decay=adamw.weight_decay, fused=True
        )
        self._loss_of = nn.CrossEntropyLoss()

    def train(self, num_steps: int) -> None:
        """Run `num_steps` steps, in whole epochs, each on this rank's half of a batch."""
        while num_steps > 0:
            for inputs, targets in self._batches():
                self._loss_of(self._model(inputs), targets).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                num_steps -= 1

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self._samples), generator=self._generator)
        for batch in torch.split(order, self._batch_size):
            mine = batch[self._rank :: self._world_size]
            yield self._samples.take(mine)
