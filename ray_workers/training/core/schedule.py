"""The learning rate and the calendar of a run, as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dray.spec import Checkpoint, LrScaling, Schedule, Train


def scaled_lr(lr: float, scaling: LrScaling | None, global_batch_size: int) -> float:
    """The peak rate for this batch size, where the document gives it for another."""
    if scaling is None:
        return lr
    return lr * _by_rule(scaling.rule, global_batch_size / scaling.reference_batch_size)


def _by_rule(rule: Literal["linear", "sqrt"], ratio: float) -> float:
    return ratio if rule == "linear" else math.sqrt(ratio)


def rate_factor(batch_size: int, train: Train) -> float:
    """The factor of the rate for a batch of this size, where the document gives a range. Exactly 1
    without one."""
    if train.batch_range is None:
        return 1.0
    return _by_rule(train.batch_scaling, batch_size / train.global_batch_size)


def lr_at(step: int, *, total_steps: int, lr: float, schedule: Schedule) -> float:
    """Learning rate of optimizer step `step` (1 is the first).

    Linear warm-up reaches `lr` at step `warmup_steps`. The cosine (Loshchilov & Hutter 2017,
    arXiv:1608.03983, one cycle) and the line then fall from `lr` and would meet
    `lr * final_ratio` one step after the last, so that no step is spent at a rate of zero.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    done = step - 1 - warmup
    match schedule.name:
        case "constant":
            return lr
        case "step":
            assert schedule.every_steps is not None
            return lr * schedule.factor ** (done // schedule.every_steps)
        case "linear":
            falling = 1.0 - done / (total_steps - warmup)
        case "cosine":
            falling = 0.5 * (1.0 + math.cos(math.pi * done / (total_steps - warmup)))
    return lr * (schedule.final_ratio + (1.0 - schedule.final_ratio) * falling)


@dataclass(frozen=True)
class Calendar:
    """Which steps evaluations and checkpoints follow: the same steps in a resumed run."""

    steps_per_epoch: int
    total_steps: int
    eval_every_epochs: int
    save_every_steps: int | None
    """None for `auto`: rank 0 then saves between these steps as well, by its own measure, which the
    other ranks do not know."""
    eval_with_save: bool
    """Each checkpoint needs its own metric, because it may be the best one."""

    @classmethod
    def of(cls, train: Train, checkpoint: Checkpoint, steps_per_epoch: int) -> Calendar:
        total = train.epochs * steps_per_epoch
        if train.max_steps is not None:
            total = min(total, train.max_steps)
        every = checkpoint.every_steps
        return cls(
            steps_per_epoch=steps_per_epoch,
            total_steps=total,
            eval_every_epochs=train.eval_every_epochs,
            save_every_steps=None if every == "auto" else every or steps_per_epoch,
            eval_with_save=checkpoint.best is not None,
        )

    @classmethod
    def of_rounds(cls, total: int, evaluate_every: int, checkpoint: Checkpoint) -> Calendar:
        """Of a federated job, which has no epochs but the stretches between its evaluations."""
        every = checkpoint.every_steps
        return cls(
            steps_per_epoch=evaluate_every,
            total_steps=total,
            eval_every_epochs=1,
            save_every_steps=None if every == "auto" else every or evaluate_every,
            eval_with_save=checkpoint.best is not None,
        )

    def epoch_of(self, step: int) -> int:
        """Epochs count from 0; the last step of an epoch belongs to it."""
        return (step - 1) // self.steps_per_epoch

    def last_of(self, first: int, num_steps: int) -> int:
        """The last step of a batch that begins with the step `first` and takes so many at once:
        fewer where an epoch, a checkpoint or the training ends before."""
        every = [self.steps_per_epoch, *filter(None, [self.save_every_steps])]
        stops = [-(-first // each) * each for each in every]
        return min(first + num_steps - 1, self.total_steps, *stops)

    def saves_after(self, step: int) -> bool:
        if step == self.total_steps:
            return True
        if self.save_every_steps is None:  # what may be the best is kept when it was measured
            return self.eval_with_save and self._ends_measured_epochs(step)
        return step % self.save_every_steps == 0

    def evaluates_after(self, step: int) -> bool:
        return (
            step == self.total_steps
            or self._ends_measured_epochs(step)
            or (self.eval_with_save and self.saves_after(step))
        )

    def _ends_measured_epochs(self, step: int) -> bool:
        return step % (self.eval_every_epochs * self.steps_per_epoch) == 0
