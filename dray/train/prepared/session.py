"""The course of a prepared training: its exchanges, and how a process takes another's place.

Ranks meet in operations, which are numbered: each exchange of gradients is one. If a group breaks
in an operation, the ranks that are left form the next group inside the same call and do it again
with the gradients that they have. A newcomer runs the script from its first line: `prepare` gives
it the state of the batch in which the others are, so its loop computes its own gradient of that
batch, and meets the others in the exchange.

The state of a batch is remembered when the loader hands the batch out (`_Anchor`). From there to
the optimizer's step the weights stay as they are, so only what is small is copied.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dray.train.prepared import compat_torch
from dray.train.prepared.exchange import GradientExchange
from dray.train.prepared.group import Group, LoopPhase, everyones
from dray.train.prepared.randomness import derive_seed, seed_generators

NO_STATE = -1
"""The number of operations of a rank that has no state yet."""
COPIED_BYTES = 1 << 16
"""Tensors of tracked objects up to this size are copied with each batch; larger ones, such as an
average of the weights, may change only after the optimizer's step."""

Result = Sequence[Tensor]
"""The outcome of one operation, the same on every rank."""


@dataclass(frozen=True)
class LoaderPosition:
    """Where a loader is: `batch` global batches of the epoch were handed out."""

    epoch: int
    batch: int


@dataclass
class _Anchor:
    """The state at the first batch after the last exchange, as far as it changes before the next
    optimizer step."""

    position: LoaderPosition
    ops: int
    steps: int
    tracked: dict[str, Any]
    groups: list[dict[str, Any]]
    """The optimizer's parameter groups without their parameters."""
    buffers: list[Tensor]
    gradients: list[Tensor | None] | None
    """None where they are not added up over several exchanges."""
    results: list[Result] = field(default_factory=list)
    """Of the operations since."""


class TrainingSession:
    """The training of one model in this process."""

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tracked: dict[str, Any],
        *,
        seed: int | None,
    ) -> None:
        """tracked: objects with `state_dict` and `load_state_dict`, by name."""
        self.group = group
        self.model = model
        self.optimizer = optimizer
        self.tracked = tracked
        self.seed = derive_seed("job", torch.initial_seed() if seed is None else seed)
        self.steps = 0
        """Optimizer steps done."""
        self.total_steps: int | None = None
        """Optimizer steps after which the loader ends; None for the end of the script's loop."""
        self.position = LoaderPosition(0, 0)
        self.is_skipping = False
        """Whether the script runs through epochs that are done."""
        self.is_void = False
        """Whether the batch is handed out once more, because the ranks share it out anew."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called when the state of a batch is remembered."""
        self._exchange = GradientExchange(model)
        self._ops = NO_STATE
        self._steps_since_anchor = 0
        self._stepped_since_exchange = False
        self._last_result: Result = ()
        self._caught_up: Result | None = None
        """The result of the operation in which this rank was, which others had ended."""
        self._replay: deque[Result] = deque()
        """Results of operations that the others have ended and this script comes to."""
        self._is_pending = False
        """Whether this rank is in an operation."""
        self._counted = self._num_global = 0
        """Samples since the last exchange: of this rank, and of all."""
        self._loaded_as: tuple[int, int] | None = None
        """(rank, world size) by which the batch at hand was shared out."""
        self._is_queued = False
        self._exchanges = True
        self._must_restore = False
        self._anchor = self._new_anchor()

    needs_even_shares = False
    """Whether each rank's share of a batch must have as many samples as the others'."""

    @property
    def place(self) -> tuple[int, int]:
        """(number, of how many) of this rank's share of each batch."""
        return self.group.rank, self.group.world_size

    @property
    def takes_part_in_saves(self) -> bool:
        return self.group.rank == 0

    def agreed(self, is_due: bool, is_leaving: bool) -> tuple[bool, bool]:
        """Whether a save is due and the job leaves, as far as this rank takes part in it."""
        return is_due, is_leaving

    @property
    def is_over(self) -> bool:
        return self.total_steps is not None and self.steps >= self.total_steps

    # Beginning.

    def begin(self, load: Callable[[], Mapping[str, Any] | None]) -> None:
        """Join the group and take the newest state: a peer's, or what rank 0 loads.

        load: a saved state, or None to begin with the model as it is.
        """
        self._load = load
        try:
            self.group.join()
            self._meet()
        except Exception as error:
            self._regroup(error)
        self._hook()

    def _hook_gradients(self) -> None:
        if self.group.world_size > 1 or self.group.may_grow:
            for parameter in self._exchange.parameters:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._gradient_came
                )

    def _hook(self) -> None:
        self._hook_gradients()
        step, session = self.optimizer.step, self

        def counted_step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if session.is_void:
                return None
            result = step(*args, **kwargs)
            session._stepped()
            return result

        # As torch's schedulers mark a step that they have wrapped.
        for name in ("_wrapped_by_lr_sched", "_with_counter"):
            if hasattr(step, name):
                setattr(counted_step, name, True)
        bound = types.MethodType(counted_step, self.optimizer)
        self.optimizer.step = bound  # type: ignore[method-assign]

    # Operations.

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Backward passes in here add gradients up locally; the next one outside exchanges them."""
        before, self._exchanges = self._exchanges, False
        try:
            yield
        finally:
            self._exchanges = before

    def _gradient_came(self, _: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            compat_torch.when_backward_ends(self._backward_ended)

    def _backward_ended(self) -> None:
        """At the end of a backward pass, in the thread that called it."""
        self._is_queued = False
        if not self._exchanges or self.is_void:
            return
        result = self._operate()
        if result is None:
            self._exchange.zero_gradients()
            return
        if result:
            self._exchange.apply(result)
        self._counted = self._num_global = 0
        self._stepped_since_exchange = False
        self.group.enter(LoopPhase.OWN_CODE, self.steps + 1)

    def _operate(self) -> Result | None:
        """The result of this exchange; empty where this rank is alone, None where the batch is
        shared out anew."""
        if self._replay:
            return self._ended(self._replay.popleft())
        self.group.enter(LoopPhase.EXCHANGE, self.steps + 1)
        self._is_pending = True
        try:
            while True:
                try:
                    if self.group.world_size == 1:
                        return self._ended(())
                    return self._ended(self._exchange.run(self._weight(), self.group.rank))
                except Exception as error:
                    self._regroup(error)
                if self._caught_up is not None:
                    result, self._caught_up = self._caught_up, None
                    return self._ended(result)
                if self.is_void:
                    return None
        finally:
            self._is_pending = False

    def _ended(self, result: Result) -> Result:
        self._ops += 1
        self._last_result = result
        self._anchor.results.append(result)
        return result

    def _weight(self) -> float:
        """This rank's part of the global batch."""
        if self._num_global:
            return self._counted / self._num_global
        return 1.0 / self.group.world_size

    def _stepped(self) -> None:
        self.steps += 1
        self._steps_since_anchor += 1
        self._stepped_since_exchange = True
        # The weights of the batch are gone, so nobody can go on from there.
        self._anchor.results.clear()
        self.group.committed(self.steps)

    # Regrouping.

    def _regroup(self, error: Exception) -> None:
        """Take a place in the next group, and have its ranks agree on the state. Raises the error
        again if it is not the group's."""
        while True:
            if not self.group.may_follow(error):
                raise error
            self.group.follow(error)
            try:
                self.group.join()
                self._meet()
                return
            except Exception as next_error:
                error = next_error

    def _meet(self) -> None:
        """Have the ranks of a new group agree. A collective.

        A rank whose operation the others have ended gets its result, and a rank without a state
        gets that of the batch at hand. If the ranks share batches out otherwise than before, those
        that are in an exchange begin the batch again.
        """
        group = self.group
        place = (group.rank, group.world_size)
        is_moved = self._loaded_as is not None and self._loaded_as != place
        can_hand_over = self._ops != NO_STATE and self._steps_since_anchor == 0
        mine = [self._known_ops, int(can_hand_over), int(is_moved)]
        table = everyones(group, mine, self._exchange.device)
        newest = max(ops for ops, _, _ in table)
        if newest == NO_STATE:
            self._begin_together()
        else:
            self._catch_up([ops for ops, _, _ in table], newest)
            self._hand_over(table, newest)
        can_redo = self._is_pending and self._caught_up is None and self._num_global > 0
        if can_redo and any(moved for _, _, moved in table):
            self.is_void = True
        group.began(self.steps)

    @property
    def _known_ops(self) -> int:
        """The number of operations whose results this rank has, also of those that its script has
        not come to yet."""
        return self._ops + len(self._replay) + (self._caught_up is not None)

    @property
    def _newest_result(self) -> Result:
        if self._caught_up is not None:
            return self._caught_up
        return self._replay[-1] if self._replay else self._last_result

    def _begin_together(self) -> None:
        if self.group.rank == 0:
            saved = self._load()
            if saved is not None:
                self._take(saved)
            else:
                self._ops = 0
                self._anchor = self._new_anchor()
        if self.group.world_size > 1:
            state = self.group.hand_over(self.state, 0)
            if state is not None:
                self._take(state)

    def _catch_up(self, everyones_ops: Sequence[int], newest: int) -> None:
        behind = [rank for rank, ops in enumerate(everyones_ops) if NO_STATE < ops < newest]
        if not behind:
            return
        source = everyones_ops.index(newest)
        result = self.group.hand_over(lambda: {"result": list(self._newest_result)}, source)
        if self.group.rank in behind:
            assert result is not None
            self._caught_up = result["result"]

    def _hand_over(self, table: Sequence[Sequence[int]], newest: int) -> None:
        if all(ops != NO_STATE for ops, _, _ in table):
            return
        holders = [rank for rank, (_, can, _) in enumerate(table) if can]
        if not holders:
            raise self.group.state_lost()
        source = max(holders, key=lambda rank: table[rank][0])
        state = self.group.hand_over(self.state, source)
        if self._ops == NO_STATE:
            assert state is not None
            self._take(state)

    # The state.

    def at_batch(self, position: LoaderPosition) -> None:
        """The loader is about to hand out a batch, or is at the end of an epoch. Takes a place in
        another group if one is wanted."""
        self.is_skipping = False
        self._is_queued = False
        if self._must_restore:
            self._must_restore = False
            self._restore_small(self._anchor)
        self.position = position
        if self._ops > self._anchor.ops or self._steps_since_anchor or self._is_unanchored:
            self._anchor = self._new_anchor()
            self._steps_since_anchor = 0
            self.on_batch()
        self.group.enter(LoopPhase.DATA, self.steps + 1)
        try:
            self.group.check()
        except Exception as error:
            self._regroup(error)

    @property
    def _is_unanchored(self) -> bool:
        """Whether no batch was handed out since the last exchange."""
        return self._num_global == 0

    def began_batch(self, counted: int, num_global: int) -> None:
        """The loader hands out a batch: so many samples of this rank, of all ranks."""
        self._counted += counted
        self._num_global += num_global
        self._loaded_as = self.place
        seed = derive_seed("step", self.seed, *self._numbers())
        seed_generators(seed)
        self.group.enter(LoopPhase.COMPUTE, self.steps + 1)

    def ended_epoch(self) -> None:
        """The loader is at the end of an epoch."""
        seed_generators(derive_seed("end", self.seed, *self._numbers()))
        self.group.enter(LoopPhase.OWN_CODE, self.steps)

    def _numbers(self) -> tuple[int, int, int, int]:
        return (self.position.epoch, self.position.batch, *self.place)

    def redo(self) -> LoaderPosition:
        """Go back to the batch that is handed out once more; returns its position."""
        self.is_void = False
        self._restore_small(self._anchor)
        self._counted = self._num_global = 0
        self.position = self._anchor.position
        return self.position

    def state(self) -> dict[str, Any]:
        """All that another process needs to go on at this batch; the tensors are the live ones."""
        anchor = self._anchor
        caught_up = () if self._caught_up is None else (self._caught_up,)
        replay = [list(result) for result in (*anchor.results, *self._replay, *caught_up)]
        return {
            "seed": self.seed,
            "ops": anchor.ops,
            "steps": anchor.steps,
            "position": [anchor.position.epoch, anchor.position.batch],
            "model": dict(self.model.state_dict()),
            "optimizer": {**self.optimizer.state_dict(), "param_groups": self._saved_groups()},
            "groups": anchor.groups,
            "buffers": anchor.buffers,
            "gradients": anchor.gradients,
            "tracked": anchor.tracked,
            "replay": replay,
        }

    def _saved_groups(self) -> list[dict[str, Any]]:
        numbered = self.optimizer.state_dict()["param_groups"]
        return [
            {**values, "params": group["params"]}
            for group, values in zip(numbered, self._anchor.groups, strict=True)
        ]

    def _take(self, state: Mapping[str, Any]) -> None:
        """Go on from another process's `state`, or from a saved one."""
        self.seed, self.steps = state["seed"], state["steps"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.position = LoaderPosition(*state["position"])
        self._ops = state["ops"]
        self._replay = deque(state["replay"])
        missing = self.tracked.keys() ^ state["tracked"].keys()
        if missing:
            raise ValueError(
                f"the saved state and this script track different objects: {', '.join(missing)}"
            )
        self._anchor = _Anchor(
            position=self.position,
            ops=self._ops,
            steps=self.steps,
            tracked=dict(state["tracked"]),
            groups=list(state["groups"]),
            buffers=list(state["buffers"]),
            gradients=state["gradients"],
        )
        self._restore_small(self._anchor)
        # A script that runs through the epochs that are done may change these on its way.
        self._must_restore = True

    def _new_anchor(self) -> _Anchor:
        adds_up = self._ops > 0 and not self._stepped_since_exchange
        return _Anchor(
            position=self.position,
            ops=self._ops,
            steps=self.steps,
            tracked={name: _copied(one.state_dict()) for name, one in self.tracked.items()},
            groups=[
                {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
            buffers=self._exchange.buffers(),
            gradients=self._exchange.gradients() if adds_up else None,
        )

    def _restore_small(self, anchor: _Anchor) -> None:
        """Put back what may have changed since the batch: not the weights."""
        for name, state in anchor.tracked.items():
            self.tracked[name].load_state_dict(_copied(state))
        for group, values in zip(self.optimizer.param_groups, anchor.groups, strict=True):
            group.update(copy.deepcopy(values))
        self._exchange.set_buffers(anchor.buffers)
        if anchor.gradients is not None:
            self._exchange.set_gradients(anchor.gradients)

    def enter_save(self) -> None:
        """The state is being saved."""
        self.group.enter(LoopPhase.SAVE, self.steps)

    # Ending.

    def finish(self) -> None:
        """Return once the scripts of all ranks have ended well; until then this rank hands its
        state over where it is asked for."""
        self.group.enter(LoopPhase.FINISH, self.steps)
        while True:
            try:
                self.group.finish()
                return
            except Exception as error:
                self._regroup(error)


def _copied(value: Any) -> Any:
    """A copy, but for tensors above `COPIED_BYTES`."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.nbytes <= COPIED_BYTES else value.detach()
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)([_copied(one) for one in value])
    return copy.deepcopy(value)
