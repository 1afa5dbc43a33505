"""Typical plain torch programs, without schedule, metrics and reports."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from benchmarks.strategies.work import (
    AGREE_EVERY,
    BATCH_SIZE,
    NUM_PIECES,
    OUTER_LR,
    OUTER_MOMENTUM,
    STAGES_PER_RANK,
    TOP_K_RATIO,
)
from dray.spec import Train
from ray_workers.recipes.models.gpt import Gpt
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import on_device
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.model_parallel.device_mesh import Context

CPU = torch.device("cpu")
WHOLE_MB = 1024
"""Bucket size that holds all gradients."""
Piece = tuple[Tensor, Tensor]


class PlainLoop:
    """A loop with the same model, data, batch size and optimizer as the job. The optimizer is
    fused, like dray's."""

    def __init__(self, way: str, workload: Workload, options: Train) -> None:
        self._samples = on_device(workload.train, CPU)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        assert isinstance(workload.model, Gpt)
        self._model = workload.model
        self._seed = options.seed
        self._part: Callable[[Piece], Piece] = self._own_samples
        self._run: Any = self._model
        self._schedule: Any = None
        self._spread = False
        """Whether each rank updates a part of the parameters, and sends it to the others."""
        self._agree: Callable[[], None] | None = None
        build: dict[str, Callable[[], None]] = {
            "data": self._replicate,
            "fp16 compression": partial(self._replicate, (None, fp16_compress_hook)),
            # Lambdas, because DDP would reject this hook on CPU due to its name, and requires
            # annotations that are not postponed for custom functions.
            "bf16 compression": partial(
                self._replicate, (None, lambda group, bucket: bf16_compress_hook(group, bucket))
            ),
            "powersgd": partial(
                self._replicate,
                (
                    PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
                    powerSGD_hook,
                ),
                cap_mb=WHOLE_MB,
            ),
            "top-k": partial(
                self._replicate,
                ({}, lambda rests, bucket: _send_largest(rests, bucket)),
                cap_mb=WHOLE_MB,
            ),
            "local SGD": self._step_alone,
            "DiLoCo": partial(self._step_alone, outer=True),
            "shard, ZeRO 1": self._spread_the_optimizer,
            "shard, ZeRO 2": partial(self._shard, (2,), again=False),
            "shard, ZeRO 3": partial(self._shard, (2,)),
            "data x shard": partial(self._shard, (2, 2)),
            "tensor": self._tensor,
            "shard x tensor": self._shard_and_tensor,
            "pipeline, GPipe": partial(self._pipeline, ScheduleGPipe),
            "pipeline, 1F1B": partial(self._pipeline, Schedule1F1B),
            "pipeline, interleaved": partial(self._stages, ScheduleInterleaved1F1B),
            "pipeline, zero bubble": partial(self._stages, ScheduleInterleavedZeroBubble),
            "context": self._context,
        }
        build[way]()
        parameters = list(self._model.parameters())
        adamw: dict[str, Any] = {"lr": options.optimizer.lr, "weight_decay": 0.0, "fused": True}
        self._optimizer: torch.optim.Optimizer = (
            ZeroRedundancyOptimizer(parameters, AdamW, **adamw)
            if self._spread
            else AdamW(parameters, **adamw)
        )
        generator = torch.Generator().manual_seed(options.seed)
        self._batches = self._endless(generator)

    # Model layouts.

    def _replicate(self, hook: tuple[Any, Any] | None = None, cap_mb: int | None = None) -> None:
        materialise(self._model, CPU, self._seed)
        ddp = DistributedDataParallel(
            self._model, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
        )
        if hook is not None:
            ddp.register_comm_hook(*hook)
        self._run = ddp

    def _spread_the_optimizer(self) -> None:
        self._replicate()
        self._spread = True

    def _step_alone(self, *, outer: bool = False) -> None:
        materialise(self._model, CPU, self._seed)
        self._agree = Agreement(self._model, outer=outer)

    def _shard(self, shape: tuple[int, ...], *, again: bool = True) -> None:
        """again: gather the parameters again for the backward pass. If `shape` has two numbers,
        there are several replicas, each of which is sharded."""
        names = ("shard",) if len(shape) == 1 else ("data", "shard")
        self._shard_over(init_device_mesh("cpu", shape, mesh_dim_names=names), again=again)

    def _shard_over(self, mesh: DeviceMesh, *, again: bool = True) -> None:
        for block in self._model.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        fully_shard(self._model, mesh=mesh, reshard_after_forward=again)
        materialise(self._model, CPU, self._seed)

    def _tensor(self) -> None:
        self._part = _everything
        self._model.divide_matrices(init_device_mesh("cpu", (self._size,)))
        materialise(self._model, CPU, self._seed)

    def _shard_and_tensor(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        number, parts = mesh["shard"].get_local_rank(), mesh["shard"].size()
        self._part = lambda piece: (piece[0][number::parts], piece[1][number::parts])
        self._model.divide_matrices(mesh["tensor"])
        self._shard_over(mesh["shard"])

    def _context(self) -> None:
        mesh = init_device_mesh("cpu", (self._size,))
        context = Context(mesh.get_group())
        self._part = lambda piece: (context.part(piece[0]), context.part(piece[1]))
        self._model.divide_sequence(context)
        self._shard_over(mesh)

    def _pipeline(self, schedule: Any) -> None:
        self._part = _everything
        self._model.keep_stage(self._rank, self._size)
        materialise(self._model, CPU, self._seed)
        stage = PipelineStage(self._model, self._rank, self._size, CPU)
        self._schedule = schedule(stage, NUM_PIECES, loss_fn=_loss)

    def _stages(self, schedule: Any) -> None:
        """Assign several stages to each rank: rank r of n has stages r, r + n, r + 2 n and so
        on."""
        self._part = _everything
        num_stages = STAGES_PER_RANK * self._size
        numbers = range(self._rank, num_stages, self._size)
        modules = []
        for number in numbers:
            module = copy.deepcopy(self._model)
            module.keep_stage(number, num_stages)
            materialise(module, CPU, self._seed)
            modules.append(module)
        self._model = nn.ModuleList(modules)  # type: ignore[assignment]
        stages = [
            PipelineStage(module, number, num_stages, CPU)
            for number, module in zip(numbers, modules, strict=True)
        ]
        self._schedule = schedule(stages, NUM_PIECES, loss_fn=_loss)

    def _own_samples(self, piece: Piece) -> Piece:
        inputs, targets = piece
        return inputs[self._rank :: self._size], targets[self._rank :: self._size]

    # Training.

    def train(self, num_steps: int) -> None:
        for number, piece in enumerate(itertools.islice(self._batches, num_steps), 1):
            inputs, targets = self._part(piece)
            if self._schedule is None:
                torch.autograd.backward(_loss(self._run(inputs), targets))
            elif self._rank == 0:
                self._schedule.step(inputs)
            else:
                self._schedule.step(target=targets, return_outputs=False)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._agree is not None and number % AGREE_EVERY == 0:
                self._agree()

    def _endless(self, generator: torch.Generator) -> Iterator[Piece]:
        while True:
            order = torch.randperm(len(self._samples), generator=generator)
            for batch in torch.split(order, BATCH_SIZE):
                if len(batch) == BATCH_SIZE:
                    yield self._samples.take(batch)


class Agreement:
    """Replaces the weights of independently trained ranks with their mean, or runs an outer
    optimizer step towards the mean."""

    def __init__(self, model: nn.Module, *, outer: bool) -> None:
        self._weights = [parameter.detach() for parameter in model.parameters()]
        self._agreed = [weight.clone() for weight in self._weights]
        self._outer = (
            SGD(self._agreed, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
            if outer
            else None
        )

    @torch.no_grad()
    def __call__(self) -> None:
        flat = torch.cat([weight.reshape(-1) for weight in self._weights])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [weight.numel() for weight in self._weights])
        means = [part.view_as(weight) for part, weight in zip(parts, self._weights, strict=True)]
        if self._outer is None:
            torch._foreach_copy_(self._weights, means)
            return
        for agreed, mean in zip(self._agreed, means, strict=True):
            agreed.grad = agreed - mean
        self._outer.step()
        torch._foreach_copy_(self._weights, self._agreed)


def _send_largest(rests: dict[Tensor, Tensor], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook that sends the largest elements of each gradient, and keeps the rest for
    the next step."""
    flat, start = bucket.buffer(), 0
    numbers, values = [], []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter not in rests:
            rests[parameter] = torch.zeros_like(gradient).view(-1)
        rest = rests[parameter]
        rest += gradient.view(-1)
        largest = rest.abs().topk(max(1, int(rest.numel() * TOP_K_RATIO)), sorted=False).indices
        numbers.append(largest + start)
        values.append(rest[largest])
        rest[largest] = 0.0
        start += gradient.numel()
    sent = torch.cat([torch.cat(numbers).int(), torch.cat(values).view(torch.int32)])
    received = sent.new_empty(dist.get_world_size() * len(sent))
    dist.all_gather_into_tensor(received, sent)
    flat.zero_()
    for theirs in received.view(dist.get_world_size(), 2, -1):
        flat.index_add_(0, theirs[0].long(), theirs[1].view(flat.dtype) / dist.get_world_size())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(flat)
    return done


def _everything(piece: Piece) -> Piece:
    return piece


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
