"""A bare program: the same compiled model, with nothing but its steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.optim import AdamW

from dray.spec import Train
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.parallel.meta_init import materialise


class PlainLoop:
    """A loop without schedule, gradient norm, metrics or reports, also with the samples on the
    device."""

    def __init__(self, workload: Workload, options: Train, device: torch.device) -> None:
        self._device, self._batch_size = device, options.global_batch_size
        self._samples = on_device(workload.train, device)
        model = workload.model
        materialise(model, device, options.seed)
        self._optimizer = AdamW(
            model.parameters(), lr=options.optimizer.lr, weight_decay=0.0, fused=True
        )
        self._model = torch.compile(model)
        self._batches = self._endless(torch.Generator().manual_seed(options.seed))

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, targets = next(self._batches)
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                logits = self._model(inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _endless(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(self._samples), generator=generator)
            for batch in torch.split(order, self._batch_size):
                if len(batch) == self._batch_size:
                    yield self._samples.take(batch)
