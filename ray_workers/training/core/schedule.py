"""Pure functions that determine the learning rate, when to evaluate and save checkpoints, and when
to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from dray.spec import Checkpoint, EarlyStopping, LrScaling, Schedule, Train
from dray.spec.program.recipes import MINIMISED
from ray_workers.training.data.sampler import samples_of


def scaled_lr(lr: float, scaling: LrScaling | None, global_batch_size: int) -> float:
    """Return the peak learning rate for this batch size. `scaling` is set if `lr` applies to a
    different batch size."""
    if scaling is None:
        return lr
    return lr * _by_rule(scaling.rule, global_batch_size / scaling.reference_batch_size)


def _by_rule(rule: Literal["linear", "sqrt"], ratio: float) -> float:
    return ratio if rule == "linear" else math.sqrt(ratio)


def rate_factor(batch_size: int, train: Train) -> float:
    """Return the factor by which the learning rate is multiplied for a batch of this size; exactly
    1 if the document does not specify a range of sizes."""
    if train.batch_range is None:
        return 1.0
    return _by_rule(train.batch_scaling, batch_size / train.global_batch_size)


def lr_at(step: int, *, total_steps: int, lr: float, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step` (the first is 1).

    Linear warmup reaches `lr` at step `warmup_steps`. The cosine schedule (Loshchilov & Hutter
    2017, arXiv:1608.03983, one cycle) and the linear schedule then decay from `lr`. Both schedules
    would reach `lr * final_ratio` one step after the last step, so no step has a learning rate of
    zero.
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


class LearningRates:
    """The learning rate of each batch of a job."""

    def __init__(self, train: Train, total_steps: int, num_samples: int) -> None:
        """num_samples: the number of samples in an epoch."""
        self._train, self._total_steps, self._num_samples = train, total_steps, num_samples
        self._peak = scaled_lr(train.optimizer.lr, train.lr_scaling, train.global_batch_size)

    def of(self, first: int, last: int) -> float:
        """Return the learning rate of the batch that consists of these steps."""
        train = self._train
        lr = lr_at(last, total_steps=self._total_steps, lr=self._peak, schedule=train.schedule)
        if train.batch_range is None:
            return lr
        size = samples_of(first, last, self._num_samples, train.samples_per_step)
        return lr * rate_factor(size, train)


@dataclass(frozen=True)
class Calendar:
    """The steps after which evaluations and checkpoints are due, which are the same in a resumed
    run."""

    steps_per_epoch: int
    total_steps: int
    eval_every_epochs: int
    save_every_steps: int | None
    """None for `auto`. With `auto`, rank 0 also chooses steps after which to save, based on
    measurements that the other ranks don't have."""
    eval_with_save: bool
    """Whether each checkpoint needs an evaluation, because it could be the best checkpoint."""

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
        """Create the calendar of a federated job, whose epochs are the rounds between
        evaluations."""
        every = checkpoint.every_steps
        return cls(
            steps_per_epoch=evaluate_every,
            total_steps=total,
            eval_every_epochs=1,
            save_every_steps=None if every == "auto" else every or evaluate_every,
            eval_with_save=checkpoint.best is not None,
        )

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step. Epochs are counted from 0."""
        return (step - 1) // self.steps_per_epoch

    def last_of(self, first: int, num_steps: int) -> int:
        """Return the last step of a batch of at most `num_steps` steps that begins with `first`.
        The batch ends early at a checkpoint, or at the end of an epoch or of training."""
        every = [self.steps_per_epoch, *filter(None, [self.save_every_steps])]
        stops = [-(-first // each) * each for each in every]
        return min(first + num_steps - 1, self.total_steps, *stops)

    def saves_after(self, step: int) -> bool:
        if step == self.total_steps:
            return True
        if self.save_every_steps is None:  # save if it could be the best
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


def sign_of(metric: str) -> float:
    """Return the factor (1 or -1) that makes lower values of the metric better."""
    return 1.0 if metric in MINIMISED else -1.0


@dataclass(frozen=True)
class EarlyStoppingState:
    """The state of early stopping, which every checkpoint contains."""

    best: float = math.inf
    """The best value of the metric, multiplied by its sign."""
    evaluations_since: int = 0

    def after(self, rule: EarlyStopping, metrics: Mapping[str, float]) -> Self:
        """Return the state after an evaluation. NaN is not an improvement."""
        value = sign_of(rule.metric) * metrics[rule.metric]
        if value < self.best - rule.min_delta or (math.isinf(self.best) and value < self.best):
            return replace(self, best=value, evaluations_since=0)
        return replace(self, evaluations_since=self.evaluations_since + 1)

    def is_over(self, rule: EarlyStopping) -> bool:
        return self.evaluations_since >= rule.patience
