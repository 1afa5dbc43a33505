"""Plain programs, as one would write them with torch alone: no schedule, no metrics, no reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.strategies.work import BATCH_SIZE, NUM_PIECES
from dray.spec import Train
from ray_workers.recipes.models.gpt import Gpt
from ray_workers.training.initialising import materialise
from ray_workers.training.samples import on_device
from ray_workers.training.strategies.context import Context
from ray_workers.training.workload import Workload

CPU = torch.device("cpu")
Piece = tuple[Tensor, Tensor]


class PlainLoop:
    """Same model, data, batch and optimizer as the job; the optimizer fused, as dray's is."""

    def __init__(self, way: str, workload: Workload, options: Train) -> None:
        self._samples = on_device(workload.train, CPU)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        assert isinstance(workload.model, Gpt)
        self._model = workload.model
        self._part: Callable[[Piece], Piece] = _everything
        self._run: Any = self._model
        self._schedule: Any = None
        build = {
            "fp16 compression": self._data,
            "powersgd": self._data,
            "shard, ZeRO 3": self._shard,
            "shard, ZeRO 2": self._shard,
            "tensor": self._tensor,
            "pipeline": self._pipeline,
            "context": self._context,
        }
        build[way](way, options)
        parameters = list(self._model.parameters())
        self._optimizer = AdamW(parameters, lr=options.optimizer.lr, weight_decay=0.0, fused=True)
        generator = torch.Generator().manual_seed(options.seed)
        self._batches = self._endless(generator)

    def _data(self, way: str, options: Train) -> None:
        materialise(self._model, CPU, options.seed)
        self._part = self._own_samples
        cap = None if way == "fp16 compression" else 1024
        ddp = DistributedDataParallel(self._model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        if way == "fp16 compression":
            ddp.register_comm_hook(None, fp16_compress_hook)
        else:
            state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook)
        self._run = ddp

    def _shard(self, way: str, options: Train) -> None:
        self._part = self._own_samples
        mesh = init_device_mesh("cpu", (self._size,))
        self._sharded(mesh, options, again=way == "shard, ZeRO 3")

    def _sharded(self, mesh: DeviceMesh, options: Train, *, again: bool) -> None:
        for block in self._model.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        fully_shard(self._model, mesh=mesh, reshard_after_forward=again)
        materialise(self._model, CPU, options.seed)

    def _tensor(self, way: str, options: Train) -> None:
        self._model.divide_matrices(init_device_mesh("cpu", (self._size,)))
        materialise(self._model, CPU, options.seed)

    def _context(self, way: str, options: Train) -> None:
        mesh = init_device_mesh("cpu", (self._size,))
        context = Context(mesh.get_group())
        self._part = lambda piece: (context.part(piece[0]), context.part(piece[1]))
        self._model.divide_places(context)
        self._sharded(mesh, options, again=True)

    def _pipeline(self, way: str, options: Train) -> None:
        self._model.keep_stage(self._rank, self._size)
        materialise(self._model, CPU, options.seed)
        stage = PipelineStage(self._model, self._rank, self._size, CPU)
        self._schedule = Schedule1F1B(stage, NUM_PIECES, loss_fn=_loss)

    def _own_samples(self, piece: Piece) -> Piece:
        inputs, targets = piece
        return inputs[self._rank :: self._size], targets[self._rank :: self._size]

    def train(self, num_steps: int) -> None:
        for piece in itertools.islice(self._batches, num_steps):
            inputs, targets = self._part(piece)
            if self._schedule is None:
                torch.autograd.backward(_loss(self._run(inputs), targets))
            elif self._rank == 0:
                self._schedule.step(inputs)
            else:
                self._schedule.step(target=targets, return_outputs=False)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _endless(self, generator: torch.Generator) -> Iterator[Piece]:
        while True:
            order = torch.randperm(len(self._samples), generator=generator)
            for batch in torch.split(order, BATCH_SIZE):
                if len(batch) == BATCH_SIZE:
                    yield self._samples.take(batch)


def _everything(piece: Piece) -> Piece:
    return piece


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
