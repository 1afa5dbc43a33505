"""The strategy of a worker. A worker pulls weights from the servers, and pushes gradients to the
servers.

Workers don't form a process group. The replacement of a worker gets all its state from the servers,
so the loss of a worker does not affect the other workers. Worker 0, the chief, sends the servers
their initial weights, evaluates the model, saves checkpoints of the servers' state, and stores the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.shared.contracts import ALL_SENT_BYTES
from ray_workers.training.core.compat_torch import Store
from ray_workers.training.core.errors import DifferentDataError
from ray_workers.training.core.progress import NOTHING, Progress
from ray_workers.training.data.prefetcher import Feed
from ray_workers.training.parallel.gradients import GradientEngine
from ray_workers.training.parallel.optim.optimizer_step import clip_gradients, named_state
from ray_workers.training.parallel.optim.optimizers import build_optimizer
from ray_workers.training.parallel.parameter_server.batch_dispatcher import CHIEF
from ray_workers.training.parallel.parameter_server.client import Servers
from ray_workers.training.parallel.parameter_server.layout import FlatLayout, flat
from ray_workers.training.parallel.parameter_server.shard import DoneBatches
from ray_workers.training.parallel.parameter_server.worker_loop import train_served
from ray_workers.training.parallel.staleness_metrics import staleness_metrics
from ray_workers.training.parallel.strategy import (
    DataPart,
    Strategy,
    StrategyContext,
    TrainingLoop,
)

if TYPE_CHECKING:
    from ray_workers.training.elastic.rendezvous import RendezvousHandler
    from ray_workers.training.loop.trainer import Trainer


class WorkerGradients(GradientEngine):
    """Computes the gradient of this worker's samples, and reports its staleness."""

    loss = 0.0
    """Loss of the samples, weighted like the gradient."""
    staleness: int | None = None
    """Staleness of the last update; None if updates are never stale."""
    clock = 0
    """Number of batches that this process has computed and that the servers have applied."""

    def take_loss(self) -> Tensor:
        carried = super().take_loss()
        self.loss = carried.item()
        return carried

    def step_metrics(self) -> dict[str, float]:
        if self.staleness is None:
            return {}
        return {"sync/staleness": float(self.staleness), "sync/clock": float(self.clock)}


class RemoteUpdate:
    """Pushes gradients to the servers, and gets the next batch and the weights for it."""

    def __init__(self, worker: ParameterServerWorker) -> None:
        self._worker = worker

    @property
    def weights(self) -> nn.Module:
        return self._worker.model

    def loss_scale(self) -> Tensor | None:
        return None

    def step(self, lr: float) -> Tensor:
        return self._worker.push(lr)


class ParameterServerWorker(Strategy):
    """The strategy of a worker (see the module's docstring)."""

    servers: Servers
    saves_alone = False

    def __init__(self, given: StrategyContext) -> None:
        super().__init__(given)
        sync = given.spec.sync
        assert isinstance(sync, spec.ParameterServer)
        self.model = model = given.workload.model
        self.is_synchronous = sync.mode == "synchronous"
        self.num_workers = given.spec.resources.num_workers - sync.servers
        self.gradients = self._own = WorkerGradients(given.engine_parts())
        self.update = RemoteUpdate(self)
        self._layout = FlatLayout(model, sync.servers)
        self._sync = sync
        self._restored: Mapping[str, Any] = {}
        self._held: dict[str, Any] | None = None
        """The servers' state in the form of a checkpoint; None if the model's weights are not the
        weights of this state."""
        self.settled = 0
        """The step up to which all evaluations and checkpoints were complete when this worker
        joined."""
        self.batch: int | None = None
        """Number of the batch that this worker computes next; None if no batches are left."""
        self.version = 0
        """Number of optimizer steps that the servers had completed at the last reply."""
        self.counted = False
        """Whether the last push was applied. A push is not applied if another worker has already
        pushed the same batch."""
        self.applied_lr = 0.0
        """Learning rate with which the servers applied the last push."""
        self._staleness: Mapping[int, int] = {}
        """The staleness in the `ServersState` that was requested last."""
        self._moved: tuple[int, int] | None = None
        """(steps, bytes sent by workers and servers) at the last request for the state; None if the
        chief has not requested the state yet."""
        self._sent_a_step: float | None = None
        self._buffers = torch.empty(0)

    def run(self, trainer: Trainer, rendezvous: RendezvousHandler, train: TrainingLoop) -> None:
        train_served(trainer, self, rendezvous)

    def connect(self, store: Store, worker: int, limit: timedelta) -> None:
        """Connect to all servers. Raises DataError if another worker has read different data."""
        fingerprint = self.given.workload.fingerprint
        self.servers = Servers.connect(store, self._layout, worker, fingerprint, limit, self._sync)
        if not self.servers.is_same_data:
            raise DifferentDataError("workers", fingerprint)

    def data_part(self) -> DataPart:
        if self.is_synchronous:
            return DataPart(range(self.rank, self.rank + 1), self.num_workers)
        return DataPart(range(1), 1, is_on_demand=True)

    def evaluated_part(self) -> DataPart:
        return DataPart(range(1), 1)  # only the chief evaluates

    # Joining the servers.

    def sync_progress(
        self, progress: int, state: Callable[[], Mapping[str, Any]]
    ) -> tuple[int, dict[str, Any] | None]:
        """Return the servers' progress and the chief's notes, if the servers have started."""
        if not self.servers.is_ready:
            return NOTHING, None
        return Progress.just_after(self.servers.version).number, self.servers.notes

    def begin(self, step: int, notes: Mapping[str, Any]) -> None:
        """If the servers have no weights, the chief sends them the state after `step`, and other
        workers wait."""
        if self.servers.is_ready:
            self.settled = self.servers.notes["settled"]
            return
        self.settled = step
        if self.rank != CHIEF:
            return
        tensors = {"values": flat(self._layout.tensors).cpu()}
        optimizer = self._restored.get("optimizer", {"state": {}})["state"]
        if optimizer:
            tensors |= self._optimizer_vectors(optimizer)
        done = [DoneBatches(step) for _ in range(self._layout.num_servers)]
        saved = self._restored.get("servers")
        if saved is not None and len(saved["done"]) == len(done):
            done = [DoneBatches(all_up_to, set(above)) for all_up_to, above in saved["done"]]
        last_batch = self.given.calendar.total_steps
        self.servers.begin(tensors, done, last_batch, {**notes, "settled": step})
        self._moved = (len(done[0]), 0)
        self._restored = {}

    def note(self, step: int, notes: Mapping[str, Any]) -> None:
        """Store the chief's state on the servers, in case a process replaces the chief. step: the
        step up to which all due evaluations and checkpoints are complete."""
        self.servers.note({**notes, "settled": step})

    def _optimizer_vectors(self, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Convert a state that is keyed by parameter name, or by number as in older versions, to
        vectors."""
        own = [
            state[name] if name in state else state[index]
            for index, (name, _) in enumerate(self._layout.trained)
        ]
        found = {}
        for key, first in own[0].items():
            if isinstance(first, Tensor):
                whole = first if first.ndim == 0 else flat([each[key] for each in own])
                found[key] = whole.cpu()
        return found

    def prepare(self, feed: Feed, step: int) -> None:
        return

    def leave_group(self) -> None:
        self.servers.close()

    # One batch.

    def take(self) -> None:
        """Get the next batch once `batch` is complete."""
        self.batch = self.servers.take(self.batch)

    def pull(self, version: int | None = None) -> Tensor:
        """Load the servers' weights into the model, and return the norm of the last gradient."""
        pulled = self.servers.pull(version)
        self._held = None
        self._layout.write(pulled.vector)
        # Clone the buffers, because a view would keep the complete vector in memory.
        self._buffers = pulled.vector[self._layout.sizes.num_trained :].clone()
        self.version, self._own.loss = pulled.version, pulled.loss
        return torch.tensor(pulled.squares, device=self.given.device).sqrt()

    def push(self, lr: float) -> Tensor:
        """Push the gradient of `batch`, get the next batch, and return the gradient norm.

        In synchronous mode, this method waits until the servers have received the gradients of all
        workers, and then loads the updated weights into the model. At the end of the training,
        only the chief waits. Other workers don't wait for the step, because the chief might have
        stopped the training before it.
        """
        assert self.batch is not None
        batch, norm = self.batch, self.gradients.grad_norm()
        max_norm = self.options.max_grad_norm
        if max_norm is not None:
            clip_gradients(self.model, max_norm, norm)
        pushed = self.servers.push(batch, lr, self._own.loss, self._gradient())
        self.gradients.forget_gradients()
        self.version, self.counted = pushed.version, pushed.counts
        self.applied_lr = pushed.lr
        self.take()
        if not self.is_synchronous:
            self._own.staleness = pushed.staleness
            self._own.clock += pushed.counts
            return norm
        if self.batch is None and self.rank != CHIEF:
            self.counted = False
            return norm
        return self.pull(batch)

    @property
    def loss(self) -> Tensor:
        """The loss of the last update."""
        return torch.tensor(self._own.loss, device=self.given.device)

    def _gradient(self) -> Tensor:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for _, parameter in self._layout.trained
        ]
        vector = flat([*gradients, *self._layout.buffers]).cpu()
        vector[self._layout.sizes.num_trained :] -= self._buffers
        return vector

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the staleness of the updates so far, and the bytes sent per update."""
        sent = {} if self._sent_a_step is None else {ALL_SENT_BYTES: self._sent_a_step}
        return sent | staleness_metrics(self._staleness)

    # The complete state.

    def consolidate(self) -> None:
        """Get the servers' state, and load the weights into the model."""
        if self._held is not None:
            return
        state = self.servers.state()
        self._layout.write(state.tensors["values"])
        self._staleness = state.staleness
        self.version = len(state.done[0])
        self._note_moved(state.moved_bytes)
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.model.named_parameters()
        }
        optimizer = named_state(build_optimizer(self.model, self.options.optimizer), names)
        optimizer["state"] = self._optimizer_state(state.tensors)
        self._held = {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "servers": {"done": [[each.all_up_to, sorted(each.above)] for each in state.done]},
        }

    def _note_moved(self, moved_bytes: int) -> None:
        if self._moved is not None and self.version > self._moved[0]:
            step, before = self._moved
            self._sent_a_step = (moved_bytes - before) / (self.version - step)
        self._moved = (self.version, moved_bytes)

    def _optimizer_state(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self._layout.trained}
        sizes = [parameter.numel() for _, parameter in self._layout.trained]
        for key in tensors.keys() - {"values"}:
            value = tensors[key]
            parts = [value] * len(sizes) if value.ndim == 0 else torch.split(value, sizes)
            for (name, parameter), part in zip(self._layout.trained, parts, strict=True):
                found[name][key] = part.clone() if value.ndim == 0 else part.view(parameter.shape)
        return {name: state for name, state in found.items() if state}

    def state(self) -> dict[str, Any]:
        assert self._held is not None, "consolidate() comes first"
        return self._held

    def peer_state_dict(self) -> dict[str, Any]:
        return {}  # the servers have the state

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._restored = state

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        return

    def load_model(self, whole: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(whole)
