"""Telling a training that diverged: a loss or a gradient that is not finite."""

from __future__ import annotations

import math

from dray import train
from dray.spec import OnDivergence
from ray_workers.shared.frames import DivergenceReport

MOST_IN_A_ROW = 10
"""Steps in a row without a finite loss and gradient that end an attempt, unless it only warns."""


class DivergedError(Exception):
    """The loss or the gradient is not finite and does not become so again."""


class Divergence:
    """Follows the steps of one rank.

    Loss and gradient norm are the same on all ranks, so all raise at the same step; with local
    steps, where they are not, the first to raise ends the attempt. It goes by numbers that the
    reporter has read anyway: on a GPU, those of the step before.
    """

    def __init__(self, rule: OnDivergence, *, is_scaled: bool) -> None:
        """is_scaled: by fp16's loss scale, which skips a step whose gradient overflowed, or whose
        loss did, which is infinite then; one that is no number, no scale mends."""
        self._rule = rule
        self._is_scaled = is_scaled
        self._seen = 0
        self._since = 0
        self._in_a_row = 0
        self._last = ""
        self._is_told = False

    def step_done(self, rank: int, step: int, loss: float, grad_norm: float) -> None:
        """Take a step's figures; rank 0 tells of the first that are not finite. DivergedError
        after too many in a row."""
        overflowed = not math.isfinite(grad_norm)
        if step <= self._seen or (self._is_scaled and overflowed and not math.isnan(loss)):
            return  # done again after a repair, or skipped by the scaler
        self._seen = step
        if math.isfinite(loss) and not overflowed:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._since = step - self._in_a_row + 1
        self._last = f"the loss is {loss:.4g} and the norm of the gradient {grad_norm:.4g}"
        if rank == 0 and not self._is_told:
            self._is_told = True
            report = DivergenceReport(step, loss, grad_norm, then=self._rule)
            train.emit(report.KIND, report.body())
        if self._in_a_row >= MOST_IN_A_ROW and self._rule != "warn":
            raise self._error(step)

    def check_end(self, val_loss: float) -> None:
        """DivergedError if the last step left weights that are no result.

        With skip_step they are those before it, which are one unless they fail at the validation
        samples as well.
        """
        judged = self._rule in ("fail", "rollback") or (
            self._rule == "skip_step" and not math.isfinite(val_loss)
        )
        if self._in_a_row and judged:
            raise self._error(self._seen)

    def _error(self, step: int) -> DivergedError:
        return DivergedError(
            f"training diverged: {self._last} at step {step}, and not finite since step "
            f"{self._since}. Lower train.optimizer.lr, set train.max_grad_norm, or look for values "
            "in the data that are not finite"
        )
