"""Models that are divided among ranks: sharded, tensor, pipeline and context parallelism, combined
with each other and with data parallelism.

The components come from torch: FSDP2 shards parameters, gradients and optimizer state, and sums
gradients over replicas; DTensor divides matrices; `torch.distributed.pipelining` runs stages. Each
rank writes its pieces of the tensors to a checkpoint, which can be loaded regardless of how the
model is divided.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dray.spec import Parallel
from dray.train.prepared.copies import changed, tensors_in
from dray.train.prepared.dtensor import Apart, local, plain_part_of
from ray_workers.training.core.errors import PartsLostError
from ray_workers.training.core.progress import NOTHING, TORN, Progress
from ray_workers.training.data.prefetcher import Feed, Piece
from ray_workers.training.elastic import state_transfer
from ray_workers.training.parallel.activation_checkpointing import listed_parts, prepare_blocks
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.meta_init import materialise
from ray_workers.training.parallel.model_parallel.device_mesh import Context, Mesh
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
from ray_workers.training.parallel.pieces import Piece as WeightPiece
from ray_workers.training.parallel.pieces import Spread
from ray_workers.training.parallel.replicas import Replicated
from ray_workers.training.parallel.strategy import AUTOCAST, DataPart, Strategy, StrategyContext

# In each evaluation, FSDP2 warns about in-place operations on views, although dray performs none.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class ParallelizableModel(Protocol):
    """A model that supports other kinds of division in addition to sharding."""

    def keep_stage(self, stage: int, num_stages: int) -> None:
        """Remove the layers of all other stages."""

    def divide_matrices(self, mesh: DeviceMesh) -> None:
        """Divide each matrix among the ranks of a one-dimensional mesh."""

    def divide_sequence(self, context: Context) -> None:
        """Restrict the model to this rank's part of the positions of each sample."""


class ModelParallel(Strategy):
    """Base class of strategies in which each rank has a part of the model. `divide` creates the
    part for each group that the rank joins.

    Ranks that differ only along the axis `data` have bitwise identical parts. If such a rank is
    lost, another rank can therefore send its part to the replacement.
    """

    saves_alone = False
    is_whole = False
    """Whether every rank has all parameters."""
    update: OptimizerStep
    mesh: Mesh

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given)
        self._skeleton = given.workload.model  # on the meta device, without values
        self._context: Context | None = None
        self._parts: dict[str, Any] | None = None
        """This rank's state in the previous group."""
        self._part = 0
        """Number of the part of the model to which `_parts` belongs."""
        self._is_built = False
        """Whether this rank's part of the model for the current group exists."""
        self._is_torn = False
        """Whether this rank's state is invalid until a peer sends its state, because a group broke
        during an update, or because the rank has another part than in the previous group."""

    @abstractmethod
    def divide(
        self, mesh: Mesh, context: Context | None
    ) -> tuple[nn.Module, GradientEngine, OptimizerStep]:
        """Return this rank's part of the model, its gradient engine and its optimizer step. A
        collective."""

    def join_group(self, rank: int, world_size: int) -> None:
        super().join_group(rank, world_size)
        self.mesh = mesh = Mesh(self.given.spec.parallel, rank, world_size, self.device)
        if self._parts is not None and self._part != mesh.part:
            self._parts, self._is_torn = None, True
        if mesh.context_group is not None:
            self._context = Context(mesh.context_group)
        self.model, self.gradients, self.update = self.divide(mesh, self._context)
        # Store the parameters now, because FSDP replaces them during each step. Frozen parameters
        # are not part of the state, because `divide` has read them.
        self._parameters = {
            name: part for name, part in self.model.named_parameters() if part.requires_grad
        }
        self._is_built = True
        inner = ("pipeline", "context", "tensor")
        if any(mesh.sizes[axis] > 1 for axis in inner):
            self.coordinates = tuple(mesh.at[axis] for axis in inner)

    def data_part(self) -> DataPart:
        sizes, at = self.mesh.sizes, self.mesh.at
        num_shares = sizes["data"] * sizes["shard"]
        number = at["data"] * sizes["shard"] + at["shard"]
        counts = at["tensor"] == 0
        return DataPart(
            range(number, number + 1),
            num_shares,
            is_even=True,
            weight=counts / sizes["context"],
        )

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        """Raise PartsLostError if a part of the state after the last step is lost on every rank."""
        if self._is_torn and progress != NOTHING:
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
        # If some ranks have not completed the evaluation and the checkpoint after the step, all
        # ranks repeat the evaluation and the checkpoint.
        return min(newest), handed if progress < newest[self.rank] else None

    def replicated(self) -> Sequence[Replicated]:
        """Return the part that this rank updates. If each rank has all parameters, as in ZeRO 1,
        also return these parameters. An error in the updated part reaches the other ranks of its
        group, but an error in the other parameters is overwritten by the next step."""
        if self.mesh.num_replicas == 1 and not self.is_whole:
            return ()
        state = self.peer_state_dict()

        def first_twin(rank: int) -> int:
            return self._twins_of(rank)[0]

        own = {id(parameter) for parameter in self.updated_parameters()}
        names = [name for name, part in self._parameters.items() if id(part) in own]
        updated = [state["parts"][name] for name in names] if self.is_whole else state["parts"]
        alike = self.update.replicated(state["update"])
        parts = [Replicated(tensors_in([updated, alike]), first_twin)]
        if self.is_whole:
            parts.append(Replicated(tensors_in(state["parts"]), lambda _: 0))
        return parts

    def _twins_of(self, rank: int) -> list[int]:
        """Return the ranks with the same parts as `rank`, including `rank`."""
        return self.mesh.shape.with_same_part(rank, self.world_size)

    def replica_of(self, rank: int) -> Sequence[int]:
        return self.mesh.shape.with_same_replica(rank, self.world_size)

    def prepare(self, feed: Feed, step: int) -> None:
        if self._parts is not None:
            self.load_peer_state(self._parts)
        self._is_torn = False
        super().prepare(feed, step)

    def leave_group(self) -> None:
        if self._is_built:  # otherwise, the group broke while it was being formed
            self._part, self._parts = self.mesh.part, self.peer_state_dict()
            super().leave_group()
        self._is_built = False

    def narrowed(self, samples: Piece) -> Piece:
        if self._context is None:
            return samples
        inputs, targets = samples
        return self._context.part(inputs), self._context.part(targets)

    def state(self) -> dict[str, Any]:
        """Return the state with the pieces that this rank writes."""
        spread = Spread(self.mesh.positions)
        state = {"model": self.model.state_dict(), **self.update.state_dict()}
        optimizer = state.pop("optimizer")
        pieces: dict[str, Any] = spread.pieces(state, of_first=self._buffers())
        divided = (self.mesh.named("held"),) if self.is_whole else ()
        return {**pieces, "optimizer": spread.pieces(optimizer, divided=divided)}

    def trained_pieces(self) -> Mapping[str, WeightPiece]:
        spread, state = Spread(self.mesh.positions), self.update.weights.state_dict()
        pieces: dict[str, WeightPiece] = spread.pieces(state, of_first=self._buffers())
        return pieces

    def _buffers(self) -> set[int]:
        """Return the addresses of the buffers, which each rank updates itself."""
        modules = self.model, self.update.weights
        return {each.data_ptr() for module in modules for each in module.buffers()}

    def peer_state_dict(self) -> dict[str, Any]:
        if self._parts is not None:  # the previous group's state is not in the model yet
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
        with torch.no_grad():  # one tensor at a time, without another copy of the model
            for name, own in self.model.state_dict().items():
                local(own).copy_(plain_part_of(whole[name], own))
        self.update.start_average()
        self._parts = None

    def whole(self) -> Mapping[str, Tensor]:
        return self._skeleton.state_dict()


class Sharded(ModelParallel):
    """Divides parameters, gradients and optimizer state along all axes of the mesh. The messages
    with gradients also state whether a rank was asked to leave."""

    gradients: ShardedGradientEngine
    _pipeline: Pipeline | None = None

    def divide(
        self, mesh: Mesh, context: Context | None
    ) -> tuple[nn.Module, ShardedGradientEngine, OptimizerStep]:
        given = self.given
        per_rank = given.spec.parallel.stages_per_rank if mesh.sizes["pipeline"] > 1 else 1
        num_stages = mesh.sizes["pipeline"] * per_rank
        numbers = [mesh.at["pipeline"] + n * num_stages // per_rank for n in range(per_rank)]
        stages = [self._stage(mesh, context, number, num_stages) for number in numbers]
        model = stages[0] if num_stages == 1 else Stages(stages)
        parts = given.parts_with(model)
        rest = (mesh, lambda: given.page.is_asked_to_leave, self.narrowed)
        if num_stages == 1:
            gradients = ShardedGradientEngine(parts, *rest)
        else:
            own = dict(zip(numbers, stages, strict=True))
            self._pipeline = Pipeline(own, num_stages, mesh, given)
            gradients = PipelineGradientEngine(self._pipeline, parts, *rest)
        update = ShardedOptimizerStep(model, gradients, given.spec.train, given.device)
        return model, gradients, update

    def _stage(
        self, mesh: Mesh, context: Context | None, number: int, num_stages: int
    ) -> nn.Module:
        given = self.given
        model = copy.deepcopy(given.workload.model)
        divisible = cast(ParallelizableModel, model)
        if num_stages > 1:
            divisible.keep_stage(number, num_stages)
        if mesh.tensor is not None:
            divisible.divide_matrices(mesh.tensor)
        if context is not None:
            divisible.divide_sequence(context)
        prepare_blocks(model, given.spec.train)
        if mesh.exchanging is not None:
            _shard(model, mesh, mesh.exchanging, given.spec.parallel)
        # `prepare` loads this rank's state in the previous group, unless a newer state is loaded.
        has_state = self._parts is not None
        materialise(model, given.device, given.spec.train.seed, is_replaced=has_state)
        return model

    def data_part(self) -> DataPart:
        part = super().data_part()
        if self._pipeline is None:
            return part
        # Pass whole shares, because a pipeline divides them into micro-batches itself.
        return replace(part, micro_batch_size=self.options.global_batch_size)

    @property
    def preemption_requested(self) -> bool:
        return self.gradients.preemption_requested

    def predict(self, inputs: Tensor) -> Tensor | None:
        return super().predict(inputs) if self._pipeline is None else self._pipeline.predict(inputs)


def _shard(model: nn.Module, mesh: Mesh, exchanging: DeviceMesh, parallel: Parallel) -> None:
    again = parallel.zero == 3 and mesh.num_holders > 1
    policy = _policy(parallel)
    blocks = (part for part in listed_parts(model) if any(True for _ in part.parameters()))
    for unit in blocks:  # each block is gathered as a unit
        fully_shard(unit, mesh=exchanging, reshard_after_forward=again, mp_policy=policy)
    # Don't cast the model's inputs, because a table's numeric columns may contain values that a
    # 16-bit type can't represent.
    policy = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mesh=exchanging, reshard_after_forward=again, mp_policy=policy)


def _policy(parallel: Parallel) -> MixedPrecisionPolicy:
    """Return the data types that the document specifies. If a type is None, FSDP uses the model's
    data type."""
    param = AUTOCAST.get(parallel.param_dtype)
    reduce = AUTOCAST.get(parallel.reduce_dtype, param and torch.float32)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


def _local(state: Any) -> Any:
    """Replace the parts in a nested state with this rank's plain tensors."""

    def own(one: Any) -> Any:
        if isinstance(one, Apart):
            return one.part
        return local(one) if isinstance(one, Tensor) else one

    return changed(state, own)
