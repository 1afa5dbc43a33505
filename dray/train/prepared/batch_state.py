"""The state of a prepared script at the current batch, from which another process can continue
training.

This is the state at the batch's anchor. Changes that the script makes after the anchor are undone,
or repeated by the process that takes over the state.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dray.train.prepared.anchor import (
    Anchor,
    KeptOptimizer,
    LoaderPosition,
    Result,
    copied,
    large_tensors,
    load_optimizer,
    parameters_of,
    set_weights,
)
from dray.train.prepared.exchange import GradientExchange
from dray.train.prepared.hooks import hook_gradients
from dray.train.prepared.trained import Trained
from dray.train.seeding import derive_seed

NO_STATE = -1
"""The number of operations that a rank without a state reports."""


class BatchState:
    """The models, optimizers and tracked objects of a script, and a count of its operations."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        tracked: dict[str, Any],
        *,
        seed: int | None,
        broadcast_buffers: bool,
    ) -> None:
        """tracked: objects with `state_dict` and `load_state_dict`, keyed by name; optimizers among
        them are trained like `optimizers`. broadcast_buffers: whether all ranks use rank 0's
        buffers, as in DDP."""
        named = {name: one for name, one in tracked.items() if isinstance(one, Optimizer)}
        self.trained = Trained(models, [*optimizers, *named.values()])
        self.tracked = {name: one for name, one in tracked.items() if name not in named}
        self._names_of_optimizers = list(named)
        self.seed = derive_seed("job", torch.initial_seed() if seed is None else seed)
        self.steps = 0
        """Total number of optimizer steps that all optimizers have taken."""
        self.position = LoaderPosition(0, 0)
        self._exchange = GradientExchange(
            models, parameters_of(self.optimizers), broadcast_buffers=broadcast_buffers
        )
        if not any(p.requires_grad for model in models for p in model.parameters()):
            raise ValueError("prepare() was given models without trainable parameters")
        self._ops = NO_STATE
        self._last_result: Result = ()
        self._caught_up: Result | None = None
        """The result of this rank's operation, if the other ranks have already completed it."""
        self._replay: deque[Result] = deque()
        """Results of operations that the other ranks have completed, but this rank's script has
        not."""
        self._parts = 0
        """Number of calls of `prepare` after the first call."""
        self._taken: Mapping[str, Any] | None = None
        """The state from which this process continues, kept until the first batch, because it
        can contain models that the script has not prepared yet."""
        self._copied_before_step: set[int] = set()
        """Indices of the optimizers whose step was followed by an exchange in the same batch."""
        self._unstepped: set[int] = set()
        """Indices of the optimizers whose parameters have received gradients since the optimizer's
        last step."""
        self._keeps_gradients: bool | None = None
        """Whether gradients are kept with each batch, because the script accumulates them. None
        until the script uses or replaces gradients of an earlier batch for the first time. While
        the value is None, gradients are kept in host memory, because a checkpoint might need
        them."""
        self._has_replaced = False
        """Whether the script has replaced gradients of an earlier batch."""
        self._has_misled = False
        """Whether a new process was given a state that turned out to be incomplete."""
        self.incomplete_step: int | None = None
        """The newest step whose saved state turned out to be incomplete; None if there is no such
        step."""
        self._stale: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Each gradient that was computed before the anchor, with its version, keyed by the
        parameter's id. Gradients that are known to be needed are omitted. A weak reference is used
        instead of the gradient's id, because a new gradient can have the id of an old one."""
        self._hooked: set[int] = set()
        """Ids of the parameters with a gradient hook."""
        self._must_restore = False
        self._anchor = self._new_anchor()

    _uses_host_memory = True
    """Whether gradients are kept in host memory until it is known whether they are needed."""

    @property
    def models(self) -> list[nn.Module]:
        return self.trained.models

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.trained.optimizers

    @property
    def num_ops(self) -> int:
        """Number of operations that this rank's script has completed."""
        return self._ops

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    @property
    def _known_ops(self) -> int:
        """The number of operations whose results this rank has, including operations that its
        script has not reached yet."""
        return self._ops + len(self._replay) + (self._caught_up is not None)

    @property
    def _newest_result(self) -> Result:
        if self._caught_up is not None:
            return self._caught_up
        return self._replay[-1] if self._replay else self._last_result

    def _is_anchor_whole(self) -> bool:
        groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        return self._anchor.is_whole() and groups == list(map(len, self._anchor.groups))

    def _ended(self, result: Result) -> Result:
        """Record that an operation of the script has completed with this result."""
        self._ops += 1
        self._last_result = result
        self._anchor.results.append(result)
        return result

    def _note_operation(self) -> None:
        """Record the start of an operation. In each later batch, the optimizers that have already
        stepped in this batch are copied before their first step."""
        self._copied_before_step |= self._anchor.begun

    def _keep_before_step(self, number: int) -> None:
        """Before an optimizer's step, copy the optimizer if its current weights and state may be
        needed again."""
        for parameter in parameters_of([self.optimizers[number]]) if self._stale else ():
            self._look_for_stale(parameter, changes=0)
        anchor = self._anchor
        if number not in anchor.begun and number in self._copied_before_step:
            anchor.kept[number] = KeptOptimizer.of(self.optimizers[number])
        anchor.begun.add(number)

    def _go_back(self) -> None:
        """Return to the beginning of the batch and discard the results of its operations.
        `_restore` resets the tensors."""
        self._ops, self.steps = self._anchor.ops, self._anchor.steps
        self._anchor.results.clear()
        self._anchor.tracked = copied(self._anchor.tracked, whole=True)
        self._replay.clear()
        self._caught_up = None

    def _look_for_stale(self, parameter: Tensor, *, changes: int = 1) -> None:
        """Detect whether the script adds to a gradient that was computed before the batch, or steps
        with it without a backward pass. changes: the amount by which such a use increases the
        gradient's version, which increases further if the script zeroes the gradient first."""
        before = self._stale.pop(id(parameter), None)
        gradient = parameter.grad
        if before is None:
            return
        if (
            gradient is None
            or gradient is not before[0]()
            or _version_of(gradient) != before[1] + changes
        ):
            self._has_replaced = True
        elif self._keeps_gradients is None:
            self._keeps_gradients = True
            self._stale.clear()
        else:
            self._anchor.uses_unkept = True
            self.incomplete_step = self._anchor.steps
            self._keeps_gradients = True
            # A new process that received the state at this batch did not receive the gradient.
            self._has_misled = self._has_misled or self._anchor.is_handed_over

    def _watch_gradients(self) -> None:
        """If this session exchanges no gradients, detect whether earlier gradients are used,
        because checkpoints may need them. A hook takes a few microseconds, so only two parameters
        of each optimizer get a hook."""
        for optimizer in self.optimizers:
            parameters = parameters_of([optimizer])
            hook_gradients((parameters[0], parameters[-1]), self._hooked, self._look_for_stale)

    def state(self) -> dict[str, Any]:
        """Return the state for another process, with whole tensors."""
        return self.own_state()

    def own_state(self) -> dict[str, Any]:
        """Return everything that another process needs to continue at this batch. The tensors are
        not copied."""
        if self._taken is not None and self._parts < self._taken["parts"]:
            return dict(self._taken)  # later calls of prepare() add models that it contains
        anchor = self._anchor
        caught_up = () if self._caught_up is None else (self._caught_up,)
        replay = [list(result) for result in (*anchor.results, *self._replay, *caught_up)]
        return {
            "seed": self.seed,
            "ops": anchor.ops,
            "steps": anchor.steps,
            "parts": anchor.parts,
            "position": [anchor.position.epoch, anchor.position.batch],
            "models": self.trained.saved_models(anchor),
            "optimizers": self.trained.saved_optimizers(anchor),
            "others": [anchor.weight(parameter) for parameter in self.trained.others],
            "groups": anchor.groups,
            "buffers": anchor.buffers,
            "gradients": anchor.gradients,
            "has_gradients": anchor.has_gradients,
            "tracked": anchor.tracked,
            "replay": replay,
            "copied_before_step": sorted(self._copied_before_step),
            "unstepped": sorted(self._unstepped),
            "keeps_gradients": self._keeps_gradients,
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        """Continue from another process's `state`, or from a saved state."""
        self._taken = state = upgraded(state, self._names_of_optimizers)
        self.seed, self.steps = state["seed"], state["steps"]
        self.position = LoaderPosition(*state["position"])
        self._ops = state["ops"]
        self._replay = deque(state["replay"])
        self._copied_before_step = set(state["copied_before_step"])
        self._unstepped = set(state["unstepped"])
        self._keeps_gradients = state["keeps_gradients"]
        missing = self.tracked.keys() ^ state["tracked"].keys()
        if missing:
            raise ValueError(
                f"the saved state and this script track different objects: {', '.join(missing)}"
            )
        # `strict` is False because the state may include models that a later call of prepare()
        # adds.
        for model, of_model in zip(self.models, state["models"], strict=False):
            self._load_model(model, of_model)
        for optimizer, of_one in zip(self.optimizers, state["optimizers"], strict=False):
            if has_groups_of(optimizer, of_one):  # otherwise the script adds groups later
                self._load_optimizer(optimizer, of_one)
        with torch.no_grad():
            for parameter, value in zip(self.trained.others, state["others"], strict=False):
                parameter.copy_(value)
        self._anchor = Anchor(
            position=self.position,
            ops=self._ops,
            steps=self.steps,
            parts=state["parts"],
            tracked=dict(state["tracked"]),
            groups=[list(groups) for groups in state["groups"]],
            buffers=list(state["buffers"]),
            gradients=state["gradients"],
            has_gradients=state["has_gradients"],
        )
        self._restore(self._anchor)
        # Restore the anchor again before the next batch, because the script may change the restored
        # values while it skips completed epochs.
        self._must_restore = True

    def _load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        model.load_state_dict(state)

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        load_optimizer(optimizer, state)

    def _renew_anchor(self) -> None:
        """Recreate the anchor of the current batch with additional models, but keep the results of
        the previous anchor."""
        before = self._anchor
        self._anchor = replace(
            self._new_anchor(), ops=before.ops, parts=before.parts, results=before.results
        )

    def _new_anchor(self) -> Anchor:
        exchange = self._exchange
        gradients, kept = None, set[int]()
        if self._keeps_gradients is None and self._has_replaced:
            self._keeps_gradients = False
        if self._keeps_gradients is None:
            gradients = exchange.gradients(in_host_memory=self._uses_host_memory)
        elif self._keeps_gradients:
            gradients, kept = exchange.gradients(), set(map(id, exchange.parameters))
        elif self._unstepped:
            added = parameters_of(self.optimizers[number] for number in sorted(self._unstepped))
            gradients, kept = exchange.gradients(added), set(map(id, added))
        self._stale = {
            id(p): (weakref.ref(p.grad), _version_of(p.grad))
            for p in exchange.parameters
            if p.grad is not None and id(p) not in kept
        }
        tracked = {name: one.state_dict() for name, one in self.tracked.items()}
        return Anchor(
            position=self.position,
            ops=self._ops,
            steps=self.steps,
            parts=self._parts,
            tracked=copied(tracked),
            groups=[
                [
                    {key: copied(value) for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ]
                for optimizer in self.optimizers
            ],
            buffers=exchange.buffers(),
            gradients=gradients,
            has_gradients=[parameter.grad is not None for parameter in exchange.parameters],
            watched=[
                (one, one._version) for one in (*exchange.parameters, *large_tensors(tracked))
            ],
        )

    def _restore(self, anchor: Anchor) -> None:
        """Undo changes made since the batch began, by restoring all old values that were kept."""
        for number, kept in anchor.kept.items():
            set_weights(kept.weights, parameters_of([self.optimizers[number]]))
            load_optimizer(self.optimizers[number], copied(kept.state, whole=True))
        anchor.kept.clear()
        anchor.begun.clear()
        for name, state in anchor.tracked.items():
            self.tracked[name].load_state_dict(copied(state))
        for optimizer, groups in zip(self.optimizers, anchor.groups, strict=False):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.update(copy.deepcopy(values))
        self._exchange.set_buffers(anchor.buffers)
        if anchor.gradients is not None:
            self._exchange.set_gradients(anchor.gradients)
        self._exchange.set_which_have_gradients(anchor.has_gradients)
        anchor.watched = [(tensor, tensor._version) for tensor, _ in anchor.watched]

    def _check_parts(self) -> None:
        """Check that the models have the parameters that they had in `prepare` and, at the first
        batch, that the script has created all models and optimizers of the restored state."""
        if late := self._exchange.late_parameters:
            raise ValueError(
                f"a model has parameters that were created after prepare(): {', '.join(late[:5])}. "
                "The gradients of these parameters are not averaged over the ranks, and a "
                "replacement process could not load the parameters. Create all layers before "
                "prepare(), and freeze layers that are trained only later"
            )
        taken, self._taken = self._taken, None
        if taken is None:
            return
        for optimizer, of_one in zip(self.optimizers, taken["optimizers"], strict=False):
            if not has_groups_of(optimizer, of_one):
                raise ValueError(
                    f"the saved parameter groups of an optimizer ({type(optimizer).__name__}) "
                    "differ from the groups that the script has created so far: add groups "
                    "before prepare(), or at the beginning of an epoch"
                )
            self._load_optimizer(optimizer, of_one)
        for what, own in (("models", self.models), ("optimizers", self.optimizers)):
            is_added_to = self._parts > taken["parts"]  # by calls of prepare() after this state
            if len(taken[what]) != len(own) and not (is_added_to and len(taken[what]) < len(own)):
                raise ValueError(
                    f"the saved state has {len(taken[what])} {what}, but the script has prepared "
                    f"{len(own)}: the script must prepare the same number before its loop"
                )


def _version_of(gradient: Tensor) -> int:
    """Return a number that changes with the values. For a divided tensor, torch counts changes of
    the local part."""
    version: int = getattr(gradient, "_local_tensor", gradient)._version
    return version


def has_groups_of(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Whether the optimizer's parameter groups have the same sizes as the groups in the state."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    return own == [len(group["params"]) for group in state["param_groups"]]


def upgraded(state: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Convert a saved state of an older release, which had one model and tracked additional
    optimizers, to the current format. names: names of the tracked objects that are optimizers."""
    if "models" in state:
        return {"has_gradients": [], **state}
    tracked = dict(state["tracked"])
    further = [tracked.pop(name) for name in names if name in tracked]
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in groups]
        for groups in (one["param_groups"] for one in further)
    ]
    return {
        **state,
        "models": [state["model"]],
        "optimizers": [state["optimizer"], *further],
        "others": [],
        "groups": [state["groups"], *groups],
        "tracked": tracked,
        "parts": 0,
        "copied_before_step": [],
        "unstepped": [],
        "keeps_gradients": False,
        "has_gradients": [],
    }
