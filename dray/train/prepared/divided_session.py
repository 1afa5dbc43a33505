"""A training session whose model is divided among the ranks. torch exchanges the gradients during
the backward pass. No rank has the whole state, so a lost rank is not replaced. Instead, the job
resumes from its newest checkpoint, which contains whole tensors and can therefore be restored on
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dray.train.prepared import division
from dray.train.prepared.anchor import parameters_of
from dray.train.prepared.batch_state import has_groups_of, upgraded
from dray.train.prepared.division import Axes
from dray.train.prepared.dtensor import local, plain_part_of
from dray.train.prepared.group import Group, LoopPhase, everyones
from dray.train.prepared.session import TrainingSession


class DividedSession(TrainingSession):
    """Trains a model that `division.divide` has divided, in a group that has been formed."""

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tracked: dict[str, Any],
        *,
        seed: int | None,
        axes: Axes,
        keep: int,
    ) -> None:
        """keep: number of checkpoints to keep."""
        self._axes = axes
        self.checkpoints = group.checkpoints(keep)
        super().__init__(group, [model], [optimizer], tracked, seed=seed)

    @property
    def shard(self) -> tuple[int, int]:
        """Ranks along the tensor axis get the same samples and random numbers."""
        return self.group.rank // self._axes.tensor, self._axes.num_shares

    _uses_host_memory = False  # ranks gather their parts on their devices
    needs_even_shares = True
    """torch averages the ranks' gradients with equal weights."""

    @property
    def takes_part_in_saves(self) -> bool:
        return True

    def agreed(self, is_due: bool, is_leaving: bool) -> tuple[bool, bool]:
        """Return whether rank 0 wants a save, and whether any rank is asked to leave. A
        collective."""
        table = everyones(self.group, [int(is_due), int(is_leaving)], self._exchange.device)
        return bool(table[0][0]), any(leaving for _, leaving in table)

    def begin(self, load: Callable[[], Mapping[str, Any] | None]) -> None:
        saved: Mapping[str, Any] | None = None
        if self.checkpoints is not None:
            self.checkpoints.check(self.own_state())
            saved = self.checkpoints.load()
        elif self.group.rank == 0:
            saved = load()
        handed_over = None if self.checkpoints is not None else saved
        begun: dict[str, Any] = {"seed": self.seed, "saved": handed_over}
        handed = self.group.hand_over(lambda: begun, 0)
        begun = begun if handed is None else handed
        self.seed = begun["seed"]
        self._ops = 0
        if self.checkpoints is None:
            saved = begun["saved"]
        if saved is not None:
            self._take(saved)
        else:
            self._anchor = self._new_anchor()
        self.group.began(self.steps, is_verified=True)
        self._hook()

    def _hook_gradients(self) -> None:
        """Don't exchange gradients, because torch exchanges them."""
        self._watch_gradients()

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        division.set_exchanging(self.model, False)
        try:
            yield
        finally:
            division.set_exchanging(self.model, True)

    def _stepped(self, number: int) -> None:
        super()._stepped(number)
        self._count.has_exchanged = True
        self.group.enter(LoopPhase.OWN_CODE, self.steps)

    def _regroup(self, error: Exception) -> None:
        raise error

    def state(self) -> dict[str, Any]:
        """Return the state with whole tensors, as an undivided session does. A collective."""
        whole: dict[str, Any] = division.whole(self.own_state())
        return whole

    def _take(self, state: Mapping[str, Any]) -> None:
        state = upgraded(state, self._names_of_optimizers)
        optimizers = [
            # Otherwise the script adds groups later, whose parameters are not known yet.
            _divided(saved, optimizer) if has_groups_of(optimizer, saved) else saved
            for saved, optimizer in zip(state["optimizers"], self.optimizers, strict=True)
        ]
        gradients = state["gradients"]
        if gradients is not None:
            pairs = zip(gradients, self._exchange.parameters, strict=True)
            gradients = [None if g is None else division.like(g, p) for g, p in pairs]
        taken = {
            **state,
            **{key: copied_like(state[key], None) for key in ("others", "groups", "buffers")},
            "optimizers": optimizers,
            "gradients": gradients,
            "tracked": {
                name: copied_like(state["tracked"][name], one.state_dict())
                for name, one in self.tracked.items()
                if name in state["tracked"]
            }
            | {name: one for name, one in state["tracked"].items() if name not in self.tracked},
        }
        super()._take(taken)
        self._ops = self._anchor.ops = 0
        self._replay.clear()

    @torch.no_grad()
    def _load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load whole tensors, one tensor at a time, without another copy of the rank's part."""
        loaded = dict(state)
        for name, own in model.state_dict().items():
            value = state.get(name)
            if isinstance(own, DTensor) and value is not None and value.shape == own.shape:
                local(own).copy_(plain_part_of(value, own))
                loaded[name] = own
        model.load_state_dict(loaded)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        super()._load_optimizer(optimizer, _divided(state, optimizer))


def _divided(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Divide the tensors of an optimizer's state in the same way as the parameters."""
    parameters = parameters_of([optimizer])
    return {
        "param_groups": copied_like(saved["param_groups"], None),
        "state": {
            number: {key: copied_like(one, parameters[number]) for key, one in values.items()}
            for number, values in saved["state"].items()
        },
    }


def copied_like(saved: Any, own: Any) -> Any:
    """Copy a saved value. Whole tensors are divided like the tensors at the same positions of
    `own` or, if `own` is a tensor, like `own`."""
    if isinstance(saved, DTensor):
        return saved
    if isinstance(saved, torch.Tensor):
        return division.like(saved, own) if _can_divide(saved, own) else saved.clone()
    if isinstance(saved, Mapping):
        return {key: copied_like(one, _part(own, key)) for key, one in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)([copied_like(one, _part(own, at)) for at, one in enumerate(saved)])
    return saved


def _part(own: Any, key: Any) -> Any:
    if isinstance(own, Mapping):
        return own.get(key)
    if isinstance(own, list | tuple):
        return own[key] if isinstance(key, int) and key < len(own) else None
    return own


def _can_divide(saved: torch.Tensor, own: Any) -> bool:
    return (
        isinstance(own, DTensor)
        and own.shape == saved.shape
        and not any(placement.is_partial() for placement in own.placements)
    )
