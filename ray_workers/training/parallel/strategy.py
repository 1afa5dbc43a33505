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
"""Of samples, in a split."""
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
    """The worker's number, which it keeps as long as the attempt lasts: its first rank."""

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of the forward pass."""
        return autocast(self.spec.train.precision, self.device)

    def engine_parts(self, model: nn.Module | None = None) -> EngineParts:
        """A model, by default the workload's, which gets its first numbers on the device and its
        blocks as the document wants them, with its loss."""
        model = self.workload.model if model is None else model
        materialise(model, self.device, self.spec.train.seed)
        prepare_blocks(model, self.spec.train)
        return EngineParts(model, self.workload.loss_sum, self.autocast)


@dataclass(frozen=True)
class DataPart:
    """Which part of every global batch a rank computes, and of an evaluation."""

    shares: range
    """Numbers of its shares, of `num_shares` in all."""
    num_shares: int
    is_on_demand: bool = False
    """These shares are those of an evaluation; of a global batch a rank computes those that come to
    it during the step (`Strategy.turns`)."""
    is_even: bool = False
    """Every rank computes equally many pieces, because they compute them together."""
    micro_batch_size: int | None = None
    """Most samples of a piece; None for as many as the document says."""
    weight: float = 1.0
    """The weight of this rank's losses in the sum over all ranks: ranks that measure the same
    samples together have 1 together."""


class Update(Protocol):
    """Takes the optimizer's step: an `OptimizerStep`, or servers that have the optimizer."""

    @property
    def weights(self) -> nn.Module:
        """The model as it is to be judged and kept."""

    def loss_scale(self) -> Tensor | None:
        """The factor of the loss in the backward pass; None for 1."""

    def step(self, lr: float) -> Tensor:
        """One optimizer step; the gradient's norm before it was clipped."""


class Strategy(ABC):
    """Owns the model, what computes its gradients (`gradients`) and what applies them (`update`).

    In each group that the rank comes into the loop calls `join_group`, `sync_progress`, `load` or
    nothing, and `prepare`; these, `after_step`, `consolidate`, `judging` and `predict` are
    collectives. `leave_group` follows when the group breaks.

    A subclass overrides what it does differently, and calls the method of its base class."""

    saves_alone = True
    """Whether rank 0 has all of a checkpoint without asking the others."""
    clients: Sequence[Numbers] | None = None
    """The validation samples of each client, where clients are measured one by one."""
    gradients: GradientEngine
    update: Update
    model: nn.Module
    """This rank's part of the model."""
    rank = 0
    world_size = 1
    place: tuple[int, ...] = ()
    """The rank's place among those that hold a model together: random numbers differ by it."""

    def __init__(self, given: StrategyContext) -> None:
        self.given = given
        self.options = given.spec.train
        self.device = given.device

    def run(self, trainer: Trainer, rendezvous: RendezvousHandler, train: TrainingLoop) -> None:
        """Train to the end of the job. train: the loop of ranks that meet in groups. Preempted if
        the rank was asked to leave."""
        train(trainer, rendezvous)

    def join_group(self, rank: int, world_size: int) -> None:
        """Take a place in a group that was just formed."""
        self.rank, self.world_size = rank, world_size

    @abstractmethod
    def data_part(self) -> DataPart:
        """The part of this rank."""

    def evaluated_part(self) -> DataPart:
        """The part of an evaluation that this rank computes."""
        return self.data_part()

    def feed(self, samples: InMemorySamples | MemoryMappedSamples) -> Feed:
        """The loader of this rank's part of each step."""
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
        """Bring all to the furthest progress among them: (it, and the state of it to take over on
        a rank that lacks it). `progress.NOTHING` if no rank has a state yet.

        state: what a rank that lacks it needs, for `load`.
        """

    def compare_copies(self) -> None:  # noqa: B027
        """After a handover: CopiesDifferError if ranks that should have equal weights and optimizer
        states have different ones. A collective. Nothing where each rank has its own."""

    def prepare(self, feed: Feed, step: int) -> None:
        """Be ready for the step after `step`; all ranks have the state of that."""
        self.gradients.form(self.world_size)
        if step:
            self.gradients.settle_buckets(lambda: feed.at(1).shares)

    def turns(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        """The shares of each optimizer step that this rank takes in a step of the calendar: one,
        unless ranks go at paces of their own."""
        yield shares

    def leave_group(self) -> None:
        """Leave a broken group as if the step that it was in had not begun."""
        self.gradients.disband()

    def after_step(self, step: int) -> None:
        """Do what is due on all ranks together after the optimizer's step."""
        return

    @property
    def preemption_requested(self) -> bool:
        """Whether this rank is to leave now, with a checkpoint, because some rank was asked to."""
        return self.given.page.is_asked_to_leave

    def predict(self, inputs: Tensor) -> Tensor | None:
        """The outputs of the model that is evaluated; None on a rank that has none."""
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Within it `predict` may be called: the model is in evaluation mode. A collective."""
        judged = self.update.weights
        was_training = judged.training
        judged.eval()
        try:
            yield
        finally:
            judged.train(was_training)

    def evaluation_metrics(self) -> dict[str, float]:
        """Further metrics of the last evaluation."""
        return {}

    def narrowed(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's part of (inputs, targets) of samples that several compute together."""
        return samples

    def consolidate(self) -> None:
        """Bring the parts of the state that other ranks hold to rank 0."""
        return

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, on rank 0 after `consolidate`."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Take a whole state, as `state` gave it."""

    def peer_state_dict(self) -> dict[str, Any]:
        """The state for a rank that joins the group and holds the same parts."""
        return self.state()

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Take the result of a peer's `peer_state_dict`."""
        self.load(state)

    @abstractmethod
    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        """Begin with these weights, which have the names and shapes of `whole`."""

    def whole(self) -> Mapping[str, Tensor]:
        """The whole model's tensors by name; only their shapes count."""
        return self.model.state_dict()

    def trained(self) -> nn.Module | None:
        """The whole model for the result, on rank 0. A collective."""
        return self.update.weights
