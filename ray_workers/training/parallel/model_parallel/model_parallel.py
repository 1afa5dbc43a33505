"""Ranks that hold a model together: sharded, tensor, pipeline and context parallelism, and their
products with each other and with data parallelism.

The parts are torch's own: FSDP2 shards parameters, gradients and optimizer state and adds gradients
up over replicas; DTensor divides matrices; `torch.distributed.pipelining` runs stages. A checkpoint
holds whole tensors by name, as that of one process does, so any division loads any other's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dray.spec import Parallel
from dray.train.prepared.copies import digest, tensors_in
from ray_workers.training.core.errors import CopiesDifferError, PartsLostError
from ray_workers.training.core.progress import NOTHING, TORN, Progress
from ray_workers.training.data.prefetcher import Feed, Piece
from ray_workers.training.elastic import state_transfer
from ray_workers.training.parallel.activation_checkpointing import listed_parts, prepare_blocks
from ray_workers.training.parallel.dtensor import Apart, local, part_of, whole_of
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.model_parallel.context_parallel import Context
from ray_workers.training.parallel.model_parallel.device_mesh import Mesh
from ray_workers.training.parallel.model_parallel.pipeline import (
    Pipeline,
    PipelineGradientEngine,
    Stages,
)
from ray_workers.training.parallel.model_parallel.sharded_gradients import ShardedGradientEngine
from ray_workers.training.parallel.optim.optimizer_step import (
    OptimizerStep,
    ShardedOptimizerStep,
)
from ray_workers.training.parallel.strategy import AUTOCAST, DataPart, Strategy, StrategyContext

# FSDP2 warns, in each evaluation, of operations in place on a view: nothing here changes a model's
# outputs.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class ParallelizableModel(Protocol):
    """A model that can be divided along more than its parameters."""

    def keep_stage(self, stage: int, num_stages: int) -> None:
        """Drop all layers that are not this stage's."""

    def divide_matrices(self, mesh: DeviceMesh) -> None:
        """Have each rank of a one-dimensional mesh hold a part of each matrix."""

    def divide_places(self, context: Context) -> None:
        """Compute this rank's part of the places of each sample."""


class PartSync(Protocol):
    """The part of a strategy that the ranks of a mesh do together besides exchanging gradients."""

    @property
    def preemption_requested(self) -> bool:
        """Whether any rank had been asked to leave at the last step: all save together."""

    @property
    def is_torn(self) -> bool:
        """Whether an update began and this rank has only a part of its result."""

    def consolidate(self) -> None:
        """Make the state of `update` ready to be gathered. A collective."""


class ShardedSync:
    """The sync of sharded parts, which the gradients carry. A step changes a rank's parts alone."""

    is_torn = False

    def __init__(self, gradients: ShardedGradientEngine) -> None:
        self._gradients = gradients

    @property
    def preemption_requested(self) -> bool:
        return self._gradients.preemption_requested

    def consolidate(self) -> None:
        """The parts are gathered one by one, as DTensors."""


@dataclass(frozen=True)
class Division:
    """A rank's part of the model in one group, and the parts of the strategy that train it."""

    model: nn.Module
    gradients: GradientEngine
    update: OptimizerStep
    sync: PartSync
    pipeline: Pipeline | None = None
    is_whole: bool = False
    """Every rank has all parameters."""


Divide = Callable[[StrategyContext, Mesh, Context | None], Division]


class ModelParallel(Strategy):
    """A rank's part of the model, made anew by `divide` for every group that it comes into.

    Ranks that differ in `data` alone are equal to the bit, so one hands its parts to another that
    was replaced.
    """

    update: OptimizerStep
    mesh: Mesh
    _division: Division

    def __init__(self, given: StrategyContext, divide: Divide) -> None:
        super().__init__(given)
        self._divide = divide
        self._bones = given.workload.model  # without numbers
        self._whole: dict[str, Any] | None = None  # on rank 0, until it is saved
        self._context: Context | None = None
        self._parts: dict[str, Any] | None = None
        """This rank's state in the group before."""
        self._is_built = False
        """Whether this rank has its part of the model in the group that it is in."""
        self._is_torn = False
        """Whether a group broke in the midst of an update, and no peer gave its state since."""

    def join_group(self, rank: int, world_size: int) -> None:
        super().join_group(rank, world_size)
        self.mesh = mesh = Mesh(self.given.spec.parallel, rank, world_size, self.device)
        if mesh.context_group is not None:
            self._context = Context(mesh.context_group)
        self._division = division = self._divide(self.given, mesh, self._context)
        self.model, self.gradients = division.model, division.gradients
        self.update = division.update
        # As they are between steps; in the middle of one FSDP has others in their places.
        self._parameters = dict(self.model.named_parameters())
        self._is_built = True
        inner = ("pipeline", "context", "tensor")
        if any(mesh.sizes[axis] > 1 for axis in inner):
            self.place = tuple(mesh.at[axis] for axis in inner)

    def data_part(self) -> DataPart:
        sizes, at = self.mesh.sizes, self.mesh.at
        num_shares = sizes["data"] * sizes["shard"]
        number = at["data"] * sizes["shard"] + at["shard"]
        counts = at["tensor"] == 0
        return DataPart(
            range(number, number + 1),
            num_shares,
            is_even=True,
            # A pipeline cuts its share by itself.
            micro_batch_size=None
            if self._division.pipeline is None
            else self.options.global_batch_size,
            weight=counts / sizes["context"],
        )

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        """PartsLostError if nobody is left who holds some part as it is after the last step."""
        if self._is_torn:
            progress = TORN
        everyones = state_transfer.everyones(progress, self.device, self.world_size)
        twins = [self._twins_of(rank) for rank in range(self.world_size)]
        newest = [max(everyones[twin] for twin in each) for each in twins]
        if all(number == NOTHING for number in everyones):
            return NOTHING, None
        if min(newest) < 0 or len({Progress(number).step for number in newest}) > 1:
            raise PartsLostError
        handed = None
        mine = twins[self.rank]
        if any(everyones[twin] < newest[self.rank] for twin in mine):
            source = max(mine, key=lambda twin: everyones[twin])
            group = self.mesh.group("data")
            handed = state_transfer.broadcast(state, source, self.rank, self.device, group)
        # Evaluations and saves after the step are done again if some ranks have not done them.
        return min(newest), handed if progress < newest[self.rank] else None

    def compare_copies(self) -> None:
        """Twins compare the parts that they hold. Where each rank has all parameters, as in ZeRO 1,
        all ranks compare those."""
        if self.mesh.num_replicas == 1 and not self._division.is_whole:
            return
        state = self.peer_state_dict()
        weights = digest(tensors_in(state["parts"])) % 2**62
        updates = digest(tensors_in(self.update.replicated(state["update"]))) % 2**62
        of_parts = state_transfer.everyones(weights, self.device, self.world_size)
        of_updates = state_transfer.everyones(updates, self.device, self.world_size)
        first_twins = [self._twins_of(rank)[0] for rank in range(self.world_size)]
        holders = [0] * self.world_size if self._division.is_whole else first_twins
        if any(of_parts[rank] != of_parts[first] for rank, first in enumerate(holders)) or any(
            of_updates[rank] != of_updates[first] for rank, first in enumerate(first_twins)
        ):
            raise CopiesDifferError

    def _twins_of(self, rank: int) -> range:
        """The ranks that hold the same parts as this one."""
        sizes = self.mesh.sizes
        apart = self.mesh.num_holders * sizes["tensor"]
        block = apart * sizes["data"]
        first = rank // block * block + rank % apart
        return range(first, first + block, apart)

    def prepare(self, feed: Feed, step: int) -> None:
        if self._parts is not None:
            self.load_peer_state(self._parts)
        self.gradients.form(self.world_size)
        if step:
            self.gradients.settle_buckets(lambda: feed.at(1).shares)

    def leave_group(self) -> None:
        if self._is_built:  # else the group broke while it was being formed
            self._is_torn |= self._division.sync.is_torn
            self._parts = self.peer_state_dict()
            self.gradients.disband()
        self._is_built = False

    @property
    def preemption_requested(self) -> bool:
        return self._division.sync.preemption_requested

    def narrowed(self, samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _narrowed(samples, self._context)

    def predict(self, inputs: Tensor) -> Tensor | None:
        if self._division.pipeline is not None:
            return self._division.pipeline.predict(inputs)
        outputs: Tensor = self.update.weights(inputs)
        return outputs

    def consolidate(self) -> None:
        self._division.sync.consolidate()
        self._whole = self._gathered({"model": self.model.state_dict(), **self.update.state_dict()})

    def _gathered(self, own: dict[str, Any]) -> dict[str, Any] | None:
        """A state of all stages with whole tensors, on rank 0."""
        speaks = self.mesh.is_first_but_for_stages
        mine = _whole(own, keep=speaks)
        group = self.mesh.group("pipeline")
        if group is not None and speaks:
            mine = _merged([mine, *state_transfer.gather(lambda: mine, self.device, group)])
        return mine if self.rank == 0 else None

    def state(self) -> dict[str, Any]:
        state, self._whole = self._whole, None
        assert state is not None
        return state

    def peer_state_dict(self) -> dict[str, Any]:
        if self._parts is not None:  # of the group before: not in the model yet
            return self._parts
        return {
            "parts": {name: _local(part.detach()) for name, part in self._parameters.items()},
            "buffers": dict(self.model.named_buffers()),
            "update": _local(self.update.state_dict()),
        }

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, part in self._parameters.items():
                _local(part).copy_(state["parts"][name])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        self.update.load_parts(state["update"])
        self._parts, self._is_torn = None, False

    def load(self, state: Mapping[str, Any]) -> None:
        self.load_model(state["model"])
        self.update.load_state_dict(state)

    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        own = self.model.state_dict()
        self.model.load_state_dict({name: part_of(whole[name], own[name]) for name in own})
        self.update.start_average()
        self._parts = None

    def whole(self) -> Mapping[str, Tensor]:
        return self._bones.state_dict()

    def trained(self) -> nn.Module | None:
        if self._division.is_whole:
            return copy.deepcopy(self.update.weights) if self.rank == 0 else None
        whole = self._gathered({"model": self.model.state_dict()})
        if whole is None:
            return None
        model = copy.deepcopy(self._bones)
        on_host = {name: tensor.cpu() for name, tensor in whole["model"].items()}
        model.load_state_dict(on_host, assign=True)
        return model

    @property
    def saves_alone(self) -> bool:
        return False


def sharded(given: StrategyContext) -> ModelParallel:
    """Parameters, gradients and optimizer state in parts, along all axes of the mesh."""
    return ModelParallel(given, _sharded_division)


def _sharded_division(given: StrategyContext, mesh: Mesh, context: Context | None) -> Division:
    per_rank = given.spec.parallel.stages_per_rank if mesh.sizes["pipeline"] > 1 else 1
    num_stages = mesh.sizes["pipeline"] * per_rank
    numbers = [mesh.at["pipeline"] + n * num_stages // per_rank for n in range(per_rank)]
    stages = [_sharded_stage(given, mesh, context, number, num_stages) for number in numbers]
    loss_sum, page = given.workload.loss_sum, given.page
    narrow = partial(_narrowed, context=context)
    rest = (given.autocast, mesh, lambda: page.is_asked_to_leave, narrow)
    pipeline: Pipeline | None = None
    if num_stages == 1:
        (model,) = stages
        gradients = ShardedGradientEngine(model, loss_sum, *rest)
    else:
        model = Stages(stages)
        own = dict(zip(numbers, stages, strict=True))
        pipeline = Pipeline(own, num_stages, mesh, given)
        gradients = PipelineGradientEngine(pipeline, loss_sum, model, *rest)
    update = ShardedOptimizerStep(model, gradients, given.spec.train, given.device)
    return Division(model, gradients, update, ShardedSync(gradients), pipeline)


def _sharded_stage(
    given: StrategyContext, mesh: Mesh, context: Context | None, number: int, num_stages: int
) -> nn.Module:
    model = copy.deepcopy(given.workload.model)
    divisible = cast(ParallelizableModel, model)
    if num_stages > 1:
        divisible.keep_stage(number, num_stages)
    if mesh.tensor is not None:
        divisible.divide_matrices(mesh.tensor)
    if context is not None:
        divisible.divide_places(context)
    prepare_blocks(model, given.spec.train)
    if mesh.exchanging is not None:
        _shard(model, mesh, mesh.exchanging, given.spec.parallel)
    materialise(model, given.device, given.spec.train.seed)
    return model


def _shard(model: nn.Module, mesh: Mesh, exchanging: DeviceMesh, parallel: Parallel) -> None:
    again = parallel.zero == 3 and mesh.num_holders > 1
    policy = _policy(parallel)
    blocks = (part for part in listed_parts(model) if any(True for _ in part.parameters()))
    for unit in blocks:  # each is gathered at once
        fully_shard(unit, mesh=exchanging, reshard_after_forward=again, mp_policy=policy)
    # The model's inputs may be numbers of a table, which half a word can't hold.
    policy = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mesh=exchanging, reshard_after_forward=again, mp_policy=policy)


def _narrowed(samples: Piece, context: Context | None) -> Piece:
    """This rank's part of (inputs, targets)."""
    if context is None:
        return samples
    inputs, targets = samples
    return context.part(inputs), context.part(targets)


def _policy(parallel: Parallel) -> MixedPrecisionPolicy:
    """The types that the document asks for; None keeps the model's own."""
    param = AUTOCAST.get(parallel.param_dtype)
    reduce = AUTOCAST.get(parallel.reduce_dtype, param and torch.float32)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


def _whole(state: Any, *, keep: bool) -> Any:
    """A nested state with whole tensors where it has parts. A collective, in the state's order.

    keep: False for None in the place of every tensor, on a rank that has no use for them.
    """

    def whole(tensor: Tensor | Apart) -> Tensor | None:
        if isinstance(tensor, Apart):
            tensor = tensor.brought()
        if isinstance(tensor, DTensor):
            tensor = whole_of(tensor)
            return tensor.cpu() if keep else None
        return tensor if keep else None

    return _each_tensor(state, whole)


def _local(state: Any) -> Any:
    """A nested state with this rank's plain tensors where it has parts."""

    def own(tensor: Tensor | Apart) -> Tensor:
        return tensor.part if isinstance(tensor, Apart) else local(tensor)

    return _each_tensor(state, own)


def _each_tensor(state: Any, changed: Callable[[Tensor | Apart], Tensor | None]) -> Any:
    """A nested state with what is made of each of its tensors."""
    if isinstance(state, Tensor | Apart):
        return changed(state)
    if isinstance(state, Mapping):
        return {key: _each_tensor(value, changed) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([_each_tensor(value, changed) for value in state])
    return state


def _merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all stages from that of each; their parameters have names of their own, and the
    rest is the same in all."""
    merged: dict[str, Any] = {**states[0], "model": {}}
    merged.pop("optimizer", None)
    for state in states:
        merged["model"].update(state["model"])
        if "optimizer" in state:
            optimizer = merged.setdefault("optimizer", {"state": {}, "param_groups": []})
            optimizer["state"].update(state["optimizer"]["state"])
            optimizer["param_groups"] += state["optimizer"]["param_groups"]
    return merged
