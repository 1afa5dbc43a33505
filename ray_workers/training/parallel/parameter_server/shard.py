"""A server's part of the parameters, as a state machine that maps messages to replies without I/O.

Each batch counts only once: pushing a batch that the shard already has changes nothing. Therefore,
a batch whose worker was lost can be computed again without determining which servers already have
its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.training.parallel.optim.optimizers import build_optimizer, set_lr
from ray_workers.training.parallel.parameter_server.layout import Sizes


@dataclass(frozen=True)
class Push:
    """A worker's gradient of a batch or, in synchronous mode, of its share of the batch."""

    worker: int
    batch: int
    """Number of the batch, starting from 1."""
    lr: float
    loss: float
    """Loss of the same samples, weighted like the gradient."""
    gradient: Tensor
    """Vector with the segments of `Sizes`. The segment of buffers contains the changes to the
    buffers."""
    staleness: int | None = None
    """Staleness of the complete gradient as determined by another shard; None to determine it in
    this shard."""


@dataclass(frozen=True)
class Pushed:
    """The reply to a `Push`."""

    version: int
    """Number of batches that have been applied to the shard's weights."""
    staleness: int
    """Number of batches that were applied between the worker's pull and its push."""
    counts: bool
    """Whether the batch was new to the shard."""
    lr: float
    """Learning rate of the update, after the correction for its staleness."""


@dataclass(frozen=True)
class Weights:
    """The reply to a worker that pulls weights."""

    version: int
    values: Tensor
    """A view of the shard's memory. Copy the view before the next message is processed."""
    loss: float
    """Loss of the last batch."""
    squares: float
    """Sum of squares of this shard's part of the last gradient."""


@dataclass
class DoneBatches:
    """The numbers of the batches that have been applied. Batches can be applied in any order."""

    all_up_to: int = 0
    above: set[int] = field(default_factory=set)

    @classmethod
    def of_pair(cls, pair: Sequence[Any]) -> Self:
        """Restore the batches from a pair returned by `as_pair`."""
        all_up_to, above = pair
        return cls(all_up_to, set(above))

    def as_pair(self) -> list[Any]:
        """Return the batches as a JSON-serialisable pair."""
        return [self.all_up_to, sorted(self.above)]

    def __contains__(self, batch: int) -> bool:
        return batch <= self.all_up_to or batch in self.above

    def __len__(self) -> int:
        return self.all_up_to + len(self.above)

    def add(self, batch: int) -> None:
        self.above.add(batch)
        while self.all_up_to + 1 in self.above:
            self.all_up_to += 1
            self.above.remove(self.all_up_to)

    @property
    def last(self) -> int:
        return max(self.above, default=self.all_up_to)

    def missing(self, last: int) -> list[int]:
        """Return the batches up to `last` that have not been applied."""
        return [n for n in range(self.all_up_to + 1, last + 1) if n not in self.above]


@dataclass(frozen=True)
class ShardSnapshot:
    """The complete state of a `ParameterShard`, as the parts of a message."""

    about: dict[str, Any]
    """The JSON part."""
    tensors: dict[str, Tensor]
    """The tensors, in fp32."""


class ParameterShard:
    """The weights, the optimizer state and the buffers of one part of the model."""

    def __init__(
        self,
        sizes: Sizes,
        optimizer: spec.Optimizer,
        num_shares: int | None,
        correction: spec.Correction | None = None,
    ) -> None:
        """num_shares: number of gradients per step, one per worker. If None, each gradient is a
        step."""
        self._sizes = sizes
        self._num_shares = num_shares
        self._correction = correction
        self._values = torch.zeros(sum(sizes))
        decayed, plain, self._buffers = torch.split(self._values, list(sizes))
        # Add a dimension to the decayed values, because the optimizer applies weight decay to
        # matrices, but not to vectors.
        self._parameters = nn.ParameterDict()
        for name, values in (("decayed", decayed.unsqueeze(0)), ("plain", plain)):
            if values.numel():
                self._parameters[name] = nn.Parameter(values)
        self._optimizer = build_optimizer(self._parameters, optimizer) if self._parameters else None
        self.done = DoneBatches()
        self._staged: dict[int, Push] = {}
        self._pulled: dict[int, tuple[int, Tensor | None]] = {}
        """The last pull of each worker: (version, weights if they are needed later)."""
        self._last = (0.0, 0.0)
        self._pushed: dict[int, tuple[int, Pushed]] = {}
        """Each worker's last push that counted: (batch, reply)."""
        self.staleness: Counter[int] = Counter()
        """Number of updates, keyed by their staleness."""

    @property
    def version(self) -> int:
        return len(self.done)

    # Messages.

    def push(self, push: Push) -> Pushed:
        """Process a gradient. In synchronous mode, the shard keeps the gradient until all workers
        have pushed their gradients to all servers. All pushes are certain to be complete when a
        worker first pulls the next version. If a worker didn't receive the reply and pushes the
        batch again, it gets the same reply."""
        if self._num_shares is not None:
            if push.batch not in self.done:
                self._staged[push.worker] = push
            return Pushed(self.version, 0, counts=push.batch not in self.done, lr=push.lr)
        batch, answer = self._pushed.get(push.worker, (None, None))
        if batch == push.batch and answer is not None:
            return answer
        pulled, weights = self._pulled.get(push.worker, (self.version, None))
        staleness = self.version - pulled if push.staleness is None else push.staleness
        if push.batch in self.done:
            return Pushed(self.version, staleness, counts=False, lr=push.lr)
        gradient, lr = push.gradient, push.lr
        match self._correction:
            case spec.Correction(name="staleness_lr"):
                lr = lr / max(1, staleness)
            case spec.Correction(name="delay_compensation", strength=strength):
                if weights is not None:
                    gradient = self._compensated(gradient, weights, strength)
        self.staleness[staleness] += 1
        self._apply(push.batch, gradient, lr, push.loss)
        answer = Pushed(self.version, staleness, counts=True, lr=lr)
        self._pushed[push.worker] = (push.batch, answer)
        return answer

    def pull(self, worker: int, version: int | None = None) -> Weights:
        """Return the latest weights. In synchronous mode, return the weights of a version, or the
        latest weights if no gradient is pending."""
        if version is None and len(self._staged) == self._num_shares:
            version = self.version + 1
        if version == self.version + 1:
            self._apply_staged(version)
        assert version in (None, self.version), f"{self.version} is not {version}"
        keeps = self._correction is not None and self._correction.name == "delay_compensation"
        trained = self._values[: self._sizes.num_trained]
        self._pulled[worker] = (self.version, trained.clone() if keeps else None)
        loss, squares = self._last
        return Weights(self.version, self._values, loss, squares)

    def lost(self, worker: int) -> None:
        """Delete the last pull of a lost worker, and the last reply to the worker."""
        self._pulled.pop(worker, None)
        self._pushed.pop(worker, None)

    # The update.

    def _compensated(self, gradient: Tensor, pulled: Tensor, strength: float) -> Tensor:
        """Return the gradient with the correction of DC-ASGD, g + lambda g g (w - w_old), which
        applies only to parameters, not to buffers."""
        trained, buffers = torch.split(gradient, [self._sizes.num_trained, self._sizes.buffers])
        moved = self._values[: self._sizes.num_trained] - pulled
        return torch.cat([trained + strength * trained * trained * moved, buffers])

    def _apply_staged(self, batch: int) -> None:
        shares = [self._staged[worker] for worker in sorted(self._staged)]
        assert len(shares) == self._num_shares
        assert all(share.batch == batch for share in shares)
        total = shares[0].gradient.clone()
        for share in shares[1:]:
            total += share.gradient
        # Gradients are already weighted, but the workers' changes to buffers have to be averaged.
        total[self._sizes.num_trained :] /= len(shares)
        self._staged.clear()
        self._apply(batch, total, shares[0].lr, sum(share.loss for share in shares))

    @torch.no_grad()
    def _apply(self, batch: int, gradient: Tensor, lr: float, loss: float) -> None:
        decayed, plain, buffers = torch.split(gradient, list(self._sizes))
        self._last = (loss, float(decayed.square().sum() + plain.square().sum()))
        for name, values in (("decayed", decayed.unsqueeze(0)), ("plain", plain)):
            if name in self._parameters:
                self._parameters[name].grad = values
        if self._optimizer is not None:
            set_lr(self._optimizer, lr)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._buffers += buffers
        self.done.add(batch)

    # The state.

    def state(self) -> dict[str, Tensor]:
        """Return copies of `values` and of the optimizer state. The optimizer state consists of
        scalars, and of vectors that, unlike `values`, don't contain the buffers."""
        found = {"values": self._values.clone()}
        states = [self._optimizer_state(name) for name in self._parameters]
        for key in states[0] if states else ():
            parts = [state[key] for state in states]
            is_scalar = parts[0].ndim == 0
            found[key] = parts[0].clone() if is_scalar else torch.cat([p.view(-1) for p in parts])
        return found

    def _optimizer_state(self, name: str) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state: Mapping[str, Any] = self._optimizer.state.get(self._parameters[name], {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], done: DoneBatches) -> None:
        """Load a state as returned by `state`. done: the batches that the state includes."""
        self._values.copy_(state["values"])
        self.done = done
        keys = [key for key in state if key != "values"]
        first = 0
        for parameter in self._parameters.values():
            size = parameter.numel()
            own = {}
            for key in keys:
                value = state[key]
                is_scalar = value.ndim == 0
                part = value if is_scalar else value[first : first + size].view(parameter.shape)
                own[key] = part.clone()
            if own and self._optimizer is not None:
                self._optimizer.state[parameter] = own
            first += size

    def snapshot(self) -> ShardSnapshot:
        """Return all state on which replies to later messages depend."""
        tensors = self.state()
        tensors |= {f"staged/{each.worker}": each.gradient for each in self._staged.values()}
        kept = {worker: weights for worker, (_, weights) in self._pulled.items()}
        tensors |= {f"pulled/{worker}": each for worker, each in kept.items() if each is not None}
        about = {
            "done": self.done.as_pair(),
            "staged": [[p.worker, p.batch, p.lr, p.loss] for p in self._staged.values()],
            "pulled": [[worker, version] for worker, (version, _) in self._pulled.items()],
            "pushed": [[worker, batch, vars(a)] for worker, (batch, a) in self._pushed.items()],
            "last": self._last,
            "staleness": sorted(self.staleness.items()),
        }
        return ShardSnapshot(about, tensors)

    def restore(self, snapshot: ShardSnapshot) -> None:
        """Continue from a snapshot of another shard. This shard may keep references to the
        snapshot's tensors."""
        about, tensors = snapshot.about, snapshot.tensors
        self.load(
            {name: tensor for name, tensor in tensors.items() if "/" not in name},
            DoneBatches.of_pair(about["done"]),
        )
        self._staged = {
            worker: Push(worker, batch, lr, loss, tensors[f"staged/{worker}"])
            for worker, batch, lr, loss in about["staged"]
        }
        self._pulled = {
            worker: (version, tensors.get(f"pulled/{worker}"))
            for worker, version in about["pulled"]
        }
        self._pushed = {worker: (batch, Pushed(**a)) for worker, batch, a in about["pushed"]}
        loss, squares = about["last"]
        self._last = (loss, squares)
        self.staleness = Counter(dict(about["staleness"]))
