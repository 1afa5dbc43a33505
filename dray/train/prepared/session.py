"""A training session of a prepared script: its exchanges, and the replacement of lost processes.

Ranks synchronize in numbered operations; each exchange of gradients is one operation. If a group
breaks during an operation, the remaining ranks form the next group within the same call, and repeat
the operation with the gradients that they have. A process that replaces a lost rank runs the script
from its first line. `prepare` gives the replacement the state of the current batch, and the results
of the operations that the other ranks have completed since the batch began. The replacement
computes its own gradients of the batch, uses these results in place of its first exchanges, and
meets the other ranks in the next operation. In this operation, the ranks compare digests of their
weights and optimizer states before they exchange anything. From then on, each exchange contains a
sample of the weights, and the ranks compare digests again at the end, because the weights can begin
to differ much later if the program depends on something that was not handed over. If the weights
differ, the group ends, and the job resumes from its checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dray.train.prepared import compat_torch
from dray.train.prepared.anchor import LoaderPosition, Result, parameters_of
from dray.train.prepared.batch_state import NO_STATE, BatchState
from dray.train.prepared.exchange import SampleCount
from dray.train.prepared.group import DividedCheckpoints, Group, LoopPhase, everyones
from dray.train.prepared.hooks import hook_gradients, hook_steps, refuse_stranger
from dray.train.prepared.meeting import Meeting, RankStanding, meet
from dray.train.seeding import derive_seed, seed_generators


class TrainingSession(BatchState):
    """Trains one or several models in this process."""

    def __init__(
        self,
        group: Group,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        tracked: dict[str, Any],
        *,
        seed: int | None,
        broadcast_buffers: bool = True,
    ) -> None:
        """See `BatchState` for all arguments except the group."""
        parts = models, optimizers, tracked
        super().__init__(*parts, seed=seed, broadcast_buffers=broadcast_buffers)
        self.group = group
        self.total_steps: int | None = None
        """Number of steps after which the loader ends; None if the script decides."""
        self.is_skipping = False
        """Whether the script is repeating completed epochs without training."""
        self.is_void = False
        """Whether the batch must be handed out again, because its division has changed."""
        self.has_begun = False
        """Whether the loader has handed out a batch."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called when the state of a batch has been recorded."""
        self._is_pending = False
        """Whether this rank is in an operation."""
        self._count = SampleCount()
        self._loaded_as: tuple[int, int] | None = None
        """The rank and world size that were used to divide the current batch."""
        self._steps_of = [0] * len(self.optimizers)
        """Number of steps of each optimizer since the batch began."""
        self._must_compare = False
        """Whether the ranks must compare their copies in the next operation."""
        self.verifies = False
        """Whether each exchange verifies that the ranks' weights are equal, because the ranks have
        formed another group during training."""
        self._is_queued = False
        self._exchanges = True

    needs_even_shares = False
    """Whether all ranks' shares of a batch must have the same number of samples."""

    @property
    def shard(self) -> tuple[int, int]:
        """(index, count) of this rank's share of each batch."""
        return self.group.rank, self.group.world_size

    checkpoints: DividedCheckpoints | None = None
    """The checkpoints to which each rank writes its part; None if rank 0 saves the whole state."""

    @property
    def takes_part_in_saves(self) -> bool:
        return self.group.rank == 0

    def agreed(self, is_due: bool, is_leaving: bool) -> tuple[bool, bool]:
        """Decide from this rank's values whether a save is due and whether the job leaves."""
        return is_due, is_leaving

    @property
    def is_over(self) -> bool:
        return self.total_steps is not None and self.steps >= self.total_steps

    # Beginning.

    def begin(self, load: Callable[[], Mapping[str, Any] | None]) -> None:
        """Join the group, and take over the newest state from a peer or from rank 0's `load`.

        load: returns a saved state, or None to start with the models as they are.
        """
        self._load = load
        try:
            self._meet()
        except Exception as error:
            self._regroup(error)
        self._hook()

    def add(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Add models before the first batch. The state of the models comes from the restored state
        or, if the restored state does not contain these models, from rank 0, which sends its state
        in an operation."""
        self._parts += 1
        first_optimizer = len(self.optimizers)
        self.models.extend(models)
        self.optimizers.extend(optimizers)
        self._steps_of += [0] * len(optimizers)
        for model in models:
            self._exchange.add(model)
        self._exchange.add_others(parameters_of(optimizers))
        self._hook(first_optimizer)
        if self._taken is not None and self._parts <= self._taken["parts"]:
            self._take(self._taken)
            return
        self._renew_anchor()
        tensors = [each for model in models for each in model.state_dict().values()]
        result = self._operate(lambda: self._sent_by_first(tensors), compares=False)
        with torch.no_grad():
            for tensor, value in zip(tensors, result or tensors, strict=True):
                tensor.copy_(value)

    def _sent_by_first(self, tensors: Sequence[Tensor]) -> Result:
        """Return copies of rank 0's values of the tensors. A collective."""
        mine = [tensor.detach().clone() for tensor in tensors]
        sent = self.group.hand_over(lambda: {"tensors": mine}, 0)
        return mine if sent is None else sent["tensors"]

    def _hook(self, first_optimizer: int = 0) -> None:
        self._hook_gradients()
        for number, optimizer in enumerate(self.optimizers[first_optimizer:], first_optimizer):
            hook_steps(
                optimizer,
                functools.partial(self._will_step, number),
                functools.partial(self._stepped, number),
            )
        if first_optimizer == 0:
            register_optimizer_step_pre_hook(self._refuse_stranger)

    def _hook_gradients(self) -> None:
        if self.group.world_size == 1 and not self.group.may_grow:
            self._watch_gradients()
        else:
            hook_gradients(self._exchange.parameters, self._hooked, self._gradient_came)

    def _refuse_stranger(self, optimizer: Optimizer, *_: Any) -> None:
        refuse_stranger(optimizer, self.optimizers, self._exchange.is_known)

    # Operations.

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Accumulate gradients locally, until the next backward pass outside of this context."""
        before, self._exchanges = self._exchanges, False
        try:
            yield
        finally:
            self._exchanges = before

    def _gradient_came(self, parameter: Tensor) -> None:
        self._exchange.reached(parameter)
        if self._stale:
            self._look_for_stale(parameter)
        if not self._is_queued:
            self._is_queued = True
            compat_torch.when_backward_ends(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called at the end of a backward pass, in the thread that runs it."""
        self._is_queued = False
        if self.is_void:
            return
        self._count.passed()
        if not self._exchanges:
            return
        for number, optimizer in enumerate(self.optimizers):
            if self._exchange.reached_any(parameters_of([optimizer])):
                self._unstepped.add(number)
        weight = self._count.weight(self.group.world_size)
        result = self._operate(lambda: self._exchanged(weight))
        if result is None:
            self._exchange.zero_gradients()
            return
        if result:
            self._exchange.apply(result)
        if self.group.rank == 0:
            self._exchange.drop_pending()  # rank 0 already has its own values
        elif not self.has_begun:  # without a loader, nothing would settle them later
            self._exchange.settle_buffers()
        self._exchange.is_done()
        self._count.has_exchanged = True
        self.group.enter(LoopPhase.OWN_CODE, self.steps + 1)

    def _exchanged(self, weight: float) -> Result:
        """Return the summed gradients of all ranks. Raises an error that ends the attempt if the
        ranks' weights differ, or if the ranks are at different points of the script. For example, a
        script that counts batches itself has a different count in a replacement process."""
        done = (self._ops, self.steps, self.position.epoch, self.position.batch)
        sample = self.trained.sample(self._ops) if self.verifies else 0
        mark = derive_seed(*done, *self._steps_of, sample) % 2**32
        result = self._exchange.run(weight, self.group.rank, mark)
        self.group.wait_for_results()
        if not self._exchange.has_mark(result, mark, self.group.world_size):
            raise self._differing()
        return result

    def _differing(self) -> Exception:
        """Return the error to raise if the ranks' weights or positions in the script differ."""
        if self.verifies:
            return self.group.copies_differ()
        return ValueError(
            "the ranks have different weights or optimizer states, or are at different batches, "
            "although prepare() gave all of them the state of rank 0: since then, the script has "
            "behaved differently on some ranks. Load or change weights before prepare(), or in the "
            "same way on all ranks, and take every step on all ranks"
        )

    def _operate(self, run: Callable[[], Result], *, compares: bool = True) -> Result | None:
        """Run an operation and return its result, which is empty for a single rank, and None if the
        batch is divided again. compares: whether the ranks of a new group compare copies first."""
        self._note_operation()
        if self._replay:
            return self._ended(self._replay.popleft())
        self.group.enter(LoopPhase.EXCHANGE, self.steps + 1)
        self._is_pending = True
        try:
            while True:
                try:
                    if self.group.world_size == 1:
                        return self._ended(())
                    self._check_handed_over()
                    with self.group.operating():
                        if compares:
                            self._compare()
                        result = run()
                    return self._ended(result)
                except Exception as error:
                    self._regroup(error)
                if self.is_void:
                    return None
                if self._caught_up is not None:
                    result, self._caught_up = self._caught_up, None
                    return self._ended(result)
        finally:
            self._is_pending = False

    def _check_handed_over(self) -> None:
        """Raise an error that ends the attempt if a new process began with an incomplete state."""
        if self._has_misled:
            raise self.group.state_lost()

    def _compare(self) -> None:
        """Compare the copies of a new group's ranks, in its first operation and when the script
        ends. Raises an error that ends the attempt if the copies differ. Collective."""
        if not self._must_compare:
            return
        mine = [self.trained.digest()]
        if len({found for (found,) in everyones(self.group, mine, self._exchange.device)}) > 1:
            raise self._differing()
        self._must_compare = False
        self.group.verified()

    def _will_step(self, number: int) -> bool:
        """Called before an optimizer steps. Returns whether the step is allowed."""
        if self.is_void:
            return False
        self._keep_before_step(number)
        return True

    def _stepped(self, number: int) -> None:
        self.steps += 1
        self._steps_of[number] += 1
        self._unstepped.discard(number)
        self.group.committed(self.steps)

    # Regrouping.

    def _regroup(self, error: Exception) -> None:
        """Join the next group, and make its ranks agree on the state. Raises `error` again if the
        group did not cause it."""
        while True:
            if not self.group.may_follow(error):
                raise error
            self.group.follow(error)
            try:
                return self._meet()
            except Exception as next_error:
                error = next_error

    def _meet(self) -> None:
        """Join the group, and make its ranks agree on the state. A collective.

        If a rank is in an operation that the other ranks have completed, it gets the operation's
        result. A rank without a state gets the state of the current batch. If the ranks divide
        batches differently than before, the ranks that are in an exchange start the batch again.
        """
        group = self.group
        with group.operating():
            group.join()
            is_moved = self._loaded_as is not None and self._loaded_as != self.shard
            is_whole = self._ops != NO_STATE and self._is_anchor_whole()
            in_batch = self._is_pending and self._count.num_global > 0
            mine = RankStanding(self._known_ops, is_whole, is_moved, self._anchor.ops, in_batch)
            meeting = meet(group, mine, self._exchange.device)
            self._must_compare = group.world_size > 1
            self.verifies = self._must_compare and meeting.newest != NO_STATE
            if meeting.newest == NO_STATE:
                self._begin_together()
            else:
                self._catch_up(meeting)
                self._rewind(meeting)
                self._hand_over(meeting)
        group.began(self.steps, is_verified=not self._must_compare)

    def _rewind(self, meeting: Meeting) -> None:
        """Restart the batch if the new group divides it differently, and no rank has completed the
        interrupted exchange."""
        in_batch = self._ops != NO_STATE and self._is_pending
        if not in_batch or self._anchor.ops != meeting.restarts_at:
            return
        if not self._is_anchor_whole():
            raise self.group.state_lost()
        self._go_back()
        self.is_void = True

    def _begin_together(self) -> None:
        if self.group.rank == 0:
            if (saved := self._load()) is not None:
                self._take(saved)
            else:
                self._ops = 0
                self._anchor = self._new_anchor()
        if self.group.world_size > 1:
            state = self.group.hand_over(self.state, 0)
            if state is not None:
                self._take(state)

    def _catch_up(self, meeting: Meeting) -> None:
        if not meeting.behind:
            return
        source = meeting.with_newest
        result = self.group.hand_over(lambda: {"result": list(self._newest_result)}, source)
        if self.group.rank in meeting.behind:
            assert result is not None
            self._caught_up = result["result"]

    def _hand_over(self, meeting: Meeting) -> None:
        if not meeting.lacks_state:
            return
        if meeting.source is None:
            raise self.group.state_lost()
        rank, standing = meeting.source
        if self._anchor.ops == standing.anchor_ops:
            self._anchor.is_handed_over = True
        state = self.group.hand_over(self.state, rank)
        if self._ops == NO_STATE:
            assert state is not None
            self._take(state)

    # The state.

    def at_batch(self, position: LoaderPosition) -> None:
        """Called before the loader hands out a batch, and at the end of an epoch. Joins another
        group if one must be formed."""
        self._check_parts()
        self.has_begun = True
        self.is_skipping = False
        self._is_queued = False
        if self.group.rank != 0:
            self._exchange.settle_buffers()
        if self._must_restore:
            self._must_restore = False
            self._restore(self._anchor)
        self.position = position
        self._steps_of = [0] * len(self.optimizers)
        if self._ops > self._anchor.ops or self._anchor.has_stepped or self._count.has_exchanged:
            self._anchor = self._new_anchor()
            self.on_batch()
        self.group.enter(LoopPhase.DATA, self.steps + 1)
        try:
            self.group.check(self.steps, self.trained)
        except Exception as error:
            self._regroup(error)

    def began_batch(self, counted: int, num_global: int) -> None:
        """Called for each batch. counted, num_global: sample counts of this rank and all ranks."""
        self._count.begin(counted, num_global)
        self._loaded_as = self.shard
        self._seed_generators("step")
        self.group.enter(LoopPhase.COMPUTE, self.steps + 1)

    def ended_epoch(self) -> None:
        """Called when the loader has reached the end of an epoch."""
        self._count.begin(0, 0)
        self._seed_generators("end")
        self.group.enter(LoopPhase.OWN_CODE, self.steps)

    def _seed_generators(self, name: str) -> None:
        epoch, batch = self.position.epoch, self.position.batch
        seed_generators(derive_seed(name, self.seed, epoch, batch, *self.shard))

    def redo(self) -> LoaderPosition:
        """Go back to the batch that must be handed out again, and return its position."""
        self.is_void = False
        self._restore(self._anchor)
        self._steps_of = [0] * len(self.optimizers)
        self._count.has_exchanged = True
        self.position = self._anchor.position
        return self.position

    # Ending.

    def finish(self) -> None:
        """Wait until the scripts of all ranks have finished successfully. Until then, this rank
        hands over its state when another rank needs it."""
        if self.is_skipping:
            raise ValueError(
                f"the script ended before it reached epoch {self.position.epoch}, the current "
                "epoch of the job: prepare() restored the training state, but the loop must "
                "still iterate over the loader once for each epoch, including completed "
                "epochs, in which the loader yields no batches. Use train.epochs(n), or range(n)"
            )
        self.group.enter(LoopPhase.FINISH, self.steps)
        self._must_compare |= self.verifies
        while True:
            try:
                self._check_handed_over()
                with self.group.operating():
                    self._compare()
                self.group.finish(self.steps, self.trained)
                return
            except Exception as error:
                self._regroup(error)
