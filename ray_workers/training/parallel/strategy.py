"""The interface between the training loop and the ways to train a model on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.prefetcher import Feed, Prefetcher, Share
from ray_workers.training.data.sampler import DistributedBatchSampler
from ray_workers.training.parallel.activation_checkpointing import prepare_blocks
from ray_workers.training.parallel.gradients import EngineParts, GradientEngine
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.pieces import Piece
from ray_workers.training.parallel.replicas import ReplicaGroup

if TYPE_CHECKING:
    from ray_workers.training.elastic.rendezvous import RendezvousHandler
    from ray_workers.training.loop.trainer import Trainer

Numbers = NDArray[np.int64]
"""Indices of samples in a split."""
TrainingLoop: TypeAlias = "Callable[[Trainer, RendezvousHandler], None]"
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context manager for a forward pass in the given precision."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@dataclass(frozen=True)
class StrategyContext:
    """The job that a strategy trains, and the rank on which it runs."""

    spec: JobSpec
    workload: Workload
    device: torch.device
    calendar: Calendar
    page: HeartbeatPage
    rounds_url: str
    """`RankTask.rounds_url`."""
    worker_index: int = 0
    """Index of the worker: its first rank. The index doesn't change during the attempt."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context manager for the forward pass."""
        return autocast(self.spec.train.precision, self.device)

    def engine_parts(self, model: nn.Module | None = None) -> EngineParts:
        """Initialise a model (by default, the workload's model) on the device, prepare its blocks
        as the document specifies, and return the model with its loss function."""
        model = self.workload.model if model is None else model
        materialise(model, self.device, self.spec.train.seed)
        prepare_blocks(model, self.spec.train)
        return self.parts_with(model)

    def parts_with(self, model: nn.Module) -> EngineParts:
        """Return a model that has been initialised with the workload's loss and metrics."""
        work = self.workload
        return EngineParts(model, work.loss_sum, self.autocast, work.step_metrics)


@dataclass(frozen=True)
class DataPart:
    """The part of each global batch or of an evaluation that a rank computes."""

    shares: range
    """Indices of the rank's shares among `num_shares`."""
    num_shares: int
    is_on_demand: bool = False
    """Whether the rank gets its shares of a global batch during the step
    (`Strategy.optimizer_steps`). For such a rank, `shares` applies only to evaluations."""
    is_even: bool = False
    """Whether ranks compute their pieces together, and therefore need the same number of pieces."""
    micro_batch_size: int | None = None
    """Maximum number of samples in a piece; None for the document's limit."""
    weight: float = 1.0
    """Weight of this rank's losses in the sum over all ranks. The weights of ranks that evaluate
    the same samples sum to 1."""


class Update(Protocol):
    """Performs the optimizer step. An implementation either is an `OptimizerStep` or calls the
    servers that have the optimizer."""

    @property
    def weights(self) -> nn.Module:
        """The model to evaluate and store."""

    def loss_scale(self) -> Tensor | None:
        """Return the factor by which the loss is multiplied before the backward pass; None if the
        factor is 1."""

    def step(self, lr: float) -> Tensor:
        """Perform an optimizer step, and return the gradient norm before clipping."""


class Strategy(ReplicaGroup, ABC):
    """Owns the model, its gradient engine (`gradients`) and the optimizer step (`update`).

    For each group that the rank joins, the loop calls `join_group`, `sync_progress`, `load` if
    necessary, and `prepare`. These methods, and `after_step`, `consolidate`, `judging` and
    `predict`, are collectives. When the group breaks, the loop calls `leave_group`.

    Subclasses override methods as needed, and call the methods of the base class.
    """

    saves_alone = True
    """Whether rank 0 can save a complete checkpoint without the other ranks."""
    clients: Sequence[Numbers] | None = None
    """Validation samples of each client, if clients are evaluated separately."""
    gradients: GradientEngine
    update: Update
    model: nn.Module
    """This rank's part of the model."""
    coordinates: tuple[int, ...] = ()
    """The rank's position among the ranks that share a model. Random numbers depend on this
    position."""

    def __init__(self, given: StrategyContext) -> None:
        self.given = given
        self.options = given.spec.train
        self.device = given.device

    def run(self, trainer: Trainer, rendezvous: RendezvousHandler, train: TrainingLoop) -> None:
        """Train until the job ends. train: the loop for ranks that train in groups. Raises
        Preempted if the rank was asked to leave and has left."""
        train(trainer, rendezvous)

    def join_group(self, rank: int, world_size: int) -> None:
        """Join a group that has just been formed."""
        self.rank, self.world_size = rank, world_size
        self._hardware = None

    @abstractmethod
    def data_part(self) -> DataPart:
        """Return this rank's part of each global batch."""

    def evaluated_part(self) -> DataPart:
        """Return the part of an evaluation that this rank computes."""
        return self.data_part()

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        """Return the loader for this rank's part of each step."""
        options, part = self.options, self.data_part()
        terms = self.given.workload.train.num_terms
        batches = DistributedBatchSampler(
            len(samples),
            samples_per_step=options.samples_per_step,
            seed=options.seed,
            shares=range(part.num_shares) if part.is_on_demand else part.shares,
            num_shares=part.num_shares,
            num_terms=None if terms is None else torch.from_numpy(terms),
        )
        document_size = options.micro_batch_size or options.global_batch_size
        return Prefetcher(
            samples,
            batches,
            part.micro_batch_size or document_size,
            last_step=self.given.calendar.total_steps,
            loader_workers=self.given.spec.data.loader_workers,
            evenly=part.is_even,
            on_demand=part.is_on_demand,
        )

    @abstractmethod
    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        """Determine, on all ranks, the furthest progress of any rank. Return this progress and, on
        ranks that are behind, the state of a rank that has reached it. The progress is
        `progress.NOTHING` if no rank has a state yet.

        state: returns the state that ranks with less progress need for `load`.
        """

    def updated_parameters(self) -> Iterable[Tensor]:
        """Return the parameters that this rank's optimizer updates."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def prepare(self, feed: Feed, step: int) -> None:
        """Prepare for the step that follows `step`. All ranks have the state after `step`."""
        self.gradients.form(self.world_size)
        if step:
            self.gradients.settle_buckets(lambda: feed.at(1).shares)

    def optimizer_steps(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        """Iterate over groups of the shares that this rank computes in a step. The optimizer takes
        a step after each group of shares. A step has only one group of shares unless ranks train at
        their own speeds."""
        yield shares

    def leave_group(self) -> None:
        """Leave a broken group and discard the unfinished step."""
        self.gradients.disband()

    def after_step(self, step: int) -> None:
        """Perform work that all ranks must do together after the optimizer step."""
        return

    @property
    def preemption_requested(self) -> bool:
        """Whether this rank must save a checkpoint and leave, because some rank was asked to
        leave."""
        return self.given.page.is_asked_to_leave

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs of the evaluated model; None on a rank without outputs."""
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Context manager that switches the model to evaluation mode, so that `predict` can be
        called. A collective."""
        judged = self.update.weights
        was_training = judged.training
        judged.eval()
        try:
            yield
        finally:
            judged.train(was_training)

    def evaluation_metrics(self) -> dict[str, float]:
        """Return additional metrics of the last evaluation."""
        return {}

    def narrowed(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the (inputs, targets) of samples that several ranks compute
        together."""
        return samples

    def consolidate(self) -> None:
        """Gather the parts of the state from other ranks on rank 0."""
        return

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, on rank 0 after `consolidate`."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Load a complete state, as returned by `state`."""

    def peer_state_dict(self) -> dict[str, Any]:
        """Return the state for a rank that joins the group and has the same parts as this rank."""
        return self.state()

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of a peer's `peer_state_dict`."""
        self.load(state)

    @abstractmethod
    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        """Start training from the given weights, which have the names and shapes of `whole`."""

    def whole(self) -> Mapping[str, Tensor]:
        """Return the tensors of the complete model by name. Only their shapes matter."""
        return self.model.state_dict()

    def trained(self) -> nn.Module | None:
        """Return the complete model for the result, on rank 0. A collective. Not called if the
        model is divided."""
        return self.update.weights

    def trained_pieces(self) -> Mapping[str, Piece]:
        """Return this rank's pieces of a divided model for the result. The pieces of all ranks are
        the complete model."""
        raise NotImplementedError
