"""Detects diverged training: the loss, the gradient, or `val/loss` is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dray import train
from dray.spec import OnDivergence
from ray_workers.shared.frames import DivergenceReport

MOST_IN_A_ROW = 10
"""Number of consecutive steps with non-finite values after which an attempt ends, unless the rule
is `warn`."""


class DivergedError(Exception):
    """The loss or the gradient has become non-finite, and does not recover."""


class Divergence:
    """Monitors the steps of one rank.

    The loss and the gradient norm are the same on all ranks, so all of them raise the error at the
    same step. With local steps, the values differ between ranks, and the first rank that raises the
    error ends the attempt. Reading the values costs no additional time, because the reporter also
    reads them. On a GPU, the values come from the previous step.
    """

    def __init__(self, rule: OnDivergence, *, is_scaled: bool) -> None:
        """is_scaled: whether fp16 loss scaling skips steps in which the gradient or the loss
        overflowed to infinity. A NaN loss can't be fixed by scaling."""
        self._rule = rule
        self._is_scaled = is_scaled
        self._seen = 0
        self._in_a_row = 0
        self._last = ""
        self._is_reported = self._is_evaluation_reported = False

    @property
    def forbids_saving(self) -> bool:
        """Whether the values of the last steps were not finite, in which case even finite weights
        may be unusable."""
        return self._in_a_row > 0 and self._rule != "warn"

    def step_done(self, rank: int, step: int, loss: float, grad_norm: float) -> None:
        """Record the values of a step. Rank 0 reports the first non-finite values. Raises
        DivergedError after too many consecutive steps with such values."""
        overflowed = not math.isfinite(grad_norm)
        if step <= self._seen or (self._is_scaled and overflowed and not math.isnan(loss)):
            return  # repeated after a recovery, or skipped by the scaler
        self._seen = step
        if math.isfinite(loss) and not overflowed:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._last = f"the loss is {loss:.4g} and the gradient norm is {grad_norm:.4g}"
        if rank == 0 and not self._is_reported:
            self._is_reported = True
            self._report(step, loss, grad_norm)
        if self._in_a_row >= MOST_IN_A_ROW and self._rule != "warn":
            raise self._error()

    def evaluated(self, rank: int, step: int, val_loss: float) -> None:
        """Record the result of an evaluation. Rank 0 reports the first non-finite result, if the
        values of all steps were finite."""
        is_reported = self._is_reported or self._is_evaluation_reported
        if rank == 0 and not math.isfinite(val_loss) and not is_reported:
            self._is_evaluation_reported = True
            self._report(step, val_loss, None)

    def check_end(self, val_loss: float) -> None:
        """Raise DivergedError if the weights at the end of the training are unusable.

        With `skip_step`, the last steps may have been skipped, and the weights are from before
        these steps.
        """
        if self._rule == "warn":
            return
        if self._in_a_row and (self._rule != "skip_step" or not math.isfinite(val_loss)):
            raise self._error()
        if not math.isfinite(val_loss):
            raise DivergedError(
                f"training diverged: val/loss is {val_loss:.4g} at the end of training, although "
                "the training loss is finite. Look for validation samples with non-finite values "
                "or values far from the training data, or lower train.optimizer.lr"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the current sequence of non-finite steps, for a replacement rank."""
        return {"seen": self._seen, "in_a_row": self._in_a_row, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen, self._in_a_row = state["seen"], state["in_a_row"]
        self._last = state["last"]

    def _report(self, step: int, loss: float, grad_norm: float | None) -> None:
        report = DivergenceReport(step, loss, grad_norm, then=self._rule)
        train.emit(report.KIND, report.body())

    def _error(self) -> DivergedError:
        return DivergedError(
            f"training diverged: {self._last} at step {self._seen}. The loss or the gradient norm "
            "has been "
            f"non-finite in every step since step {self._seen - self._in_a_row + 1}. Lower "
            "train.optimizer.lr, set train.max_grad_norm, or look for values in the data that are "
            "not finite"
        )
