"""The interface between the training loop and a way to train a model on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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

if TYPE_CHECKING:
    from ray_workers.training.elastic.rendezvous import RendezvousHandler
    from ray_workers.training.loop.trainer import Trainer

Numbers = NDArray[np.int64]
"""Numbers of samples in a split."""
TrainingLoop: TypeAlias = "Callable[[Trainer, RendezvousHandler], None]"
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The precision of a forward pass."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@dataclass(frozen=True)
class StrategyContext:
    """The job that a strategy trains, and the rank that it runs on."""

    spec: JobSpec
    workload: Workload
    device: torch.device
    calendar: Calendar
    page: HeartbeatPage
    rounds_url: str
    """`RankTask.rounds_url`."""
    seat: int = 0
    """The worker's index, which it keeps for the whole attempt: its first rank."""

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of the forward pass."""
        return autocast(self.spec.train.precision, self.device)

    def engine_parts(self, model: nn.Module | None = None) -> EngineParts:
        """Initialise a model, by default the workload's, on the device, prepare its blocks as the
        document specifies, and return it with its loss."""
        model = self.workload.model if model is None else model
        materialise(model, self.device, self.spec.train.seed)
        prepare_blocks(model, self.spec.train)
        return EngineParts(model, self.workload.loss_sum, self.autocast)


@dataclass(frozen=True)
class DataPart:
    """The part of every global batch, and of an evaluation, that a rank computes."""

    shares: range
    """Indices of the rank's shares, out of `num_shares`."""
    num_shares: int
    is_on_demand: bool = False
    """Whether these shares only apply to an evaluation, and the rank gets its shares of a global
    batch during the step (`Strategy.turns`)."""
    is_even: bool = False
    """Whether ranks compute their pieces together, so that all need the same number."""
    micro_batch_size: int | None = None
    """Limit of the samples in a piece; None for the document's limit."""
    weight: float = 1.0
    """The weight of this rank's losses in the sum over all ranks: the weights of ranks that
    evaluate the same samples together add up to 1."""


class Update(Protocol):
    """Does the optimizer step: an `OptimizerStep`, or servers that have the optimizer."""

    @property
    def weights(self) -> nn.Module:
        """The model to evaluate and to store."""

    def loss_scale(self) -> Tensor | None:
        """The factor of the loss in the backward pass; None for 1."""

    def step(self, lr: float) -> Tensor:
        """Do one optimizer step, and return the gradient norm before clipping."""


class Strategy(ABC):
    """Owns the model, its gradient engine (`gradients`) and the optimizer step (`update`).

    In each group that the rank joins, the loop calls `join_group`, `sync_progress`, possibly
    `load`, and `prepare`; these, `after_step`, `consolidate`, `judging` and `predict` are
    collectives. `leave_group` follows when the group breaks.

    A subclass overrides what it does differently, and calls the method of its base class."""

    saves_alone = True
    """Whether rank 0 has all of a checkpoint without the other ranks."""
    clients: Sequence[Numbers] | None = None
    """The validation samples of each client, if clients are evaluated separately."""
    gradients: GradientEngine
    update: Update
    model: nn.Module
    """This rank's part of the model."""
    rank = 0
    world_size = 1
    place: tuple[int, ...] = ()
    """The rank's index among the ranks that have a model together: random numbers depend on it."""

    def __init__(self, given: StrategyContext) -> None:
        self.given = given
        self.options = given.spec.train
        self.device = given.device

    def run(self, trainer: Trainer, rendezvous: RendezvousHandler, train: TrainingLoop) -> None:
        """Train to the end of the job. train: the loop of ranks that meet in groups. Raises
        Preempted if the rank was asked to leave, and left."""
        train(trainer, rendezvous)

    def join_group(self, rank: int, world_size: int) -> None:
        """Join a group that was just formed."""
        self.rank, self.world_size = rank, world_size

    @abstractmethod
    def data_part(self) -> DataPart:
        """The part of each global batch for this rank."""

    def evaluated_part(self) -> DataPart:
        """The part of an evaluation for this rank."""
        return self.data_part()

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        """Return the loader of this rank's part of each step."""
        options, part = self.options, self.data_part()
        batches = DistributedBatchSampler(
            len(samples),
            samples_per_step=options.samples_per_step,
            seed=options.seed,
            shares=range(part.num_shares) if part.is_on_demand else part.shares,
            num_shares=part.num_shares,
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
        """Bring all ranks to the furthest progress among them. Return this progress, and its state
        on a rank that lacks it. The progress is `progress.NOTHING` if no rank has a state yet.

        state: returns the state that such a rank needs for `load`.
        """

    def compare_copies(self) -> None:  # noqa: B027
        """Raise CopiesDifferError if, after a transfer, ranks that should have equal weights and
        optimizer states differ. A collective. Does nothing if each rank has its own weights."""

    def prepare(self, feed: Feed, step: int) -> None:
        """Prepare for the step after `step`; all ranks have the state after `step`."""
        self.gradients.form(self.world_size)
        if step:
            self.gradients.settle_buckets(lambda: feed.at(1).shares)

    def turns(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        """Iterate over the shares that this rank computes in a step, grouped by the optimizer step
        that follows: one group, unless ranks train at their own speed."""
        yield shares

    def leave_group(self) -> None:
        """Leave a broken group, and discard the unfinished step."""
        self.gradients.disband()

    def after_step(self, step: int) -> None:
        """Do what all ranks must do together after the optimizer step."""
        return

    @property
    def preemption_requested(self) -> bool:
        """Whether this rank must leave now with a checkpoint, because a rank was asked to leave."""
        return self.given.page.is_asked_to_leave

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The outputs of the model that is evaluated; None on a rank without outputs."""
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Put the model into evaluation mode, so that `predict` may be called. A collective."""
        judged = self.update.weights
        was_training = judged.training
        judged.eval()
        try:
            yield
        finally:
            judged.train(was_training)

    def evaluation_metrics(self) -> dict[str, float]:
        """Additional metrics of the last evaluation."""
        return {}

    def narrowed(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's part of (inputs, targets) of samples that several ranks compute together."""
        return samples

    def consolidate(self) -> None:
        """Gather the parts of the state that other ranks have on rank 0."""
        return

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, on rank 0 after `consolidate`."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Load a whole state, as `state` returned it."""

    def peer_state_dict(self) -> dict[str, Any]:
        """The state for a rank that joins the group and has the same parts."""
        return self.state()

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of a peer's `peer_state_dict`."""
        self.load(state)

    @abstractmethod
    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        """Begin with these weights, which have the names and shapes of `whole`."""

    def whole(self) -> Mapping[str, Tensor]:
        """The whole model's tensors by name; only their shapes matter."""
        return self.model.state_dict()

    def trained(self) -> nn.Module | None:
        """The whole model for the result, on rank 0. A collective."""
        return self.update.weights
