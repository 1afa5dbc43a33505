"""Asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934), in the variant that
stops trials instead of pausing them: no trial waits for other trials to reach its rung.

A rung is a number of steps. A trial is judged once at each rung: the value in its first report at
the rung is compared with the values of all trials that have already been judged at that rung.
Reports can be late or missing. A trial that passes several rungs between two reports is judged only
at the highest of them, because its value does not apply to the lower rungs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dray.spec import SuccessiveHalving, Sweep


@dataclass(frozen=True)
class TrialStanding:
    """The state of a trial, derived from the metric values that it has reported so far."""

    value: float | None = None
    """The value of the trial according to the sweep's `by`; None until there is a finite value."""
    value_step: int | None = None
    """Step at which the value was reported."""
    last_step: int | None = None
    """Highest reported step."""
    rung: int | None = None
    """Index of the highest rung at which the trial was judged."""


@dataclass(frozen=True)
class Reached:
    """A rung that a trial has reached, and the value by which it is judged."""

    rung: int
    step: int
    value: float | None


def rung_at(rules: SuccessiveHalving, step: int) -> int | None:
    """Return the index of the highest rung at or below a step; None below the first rung."""
    if rules.max_steps is not None:
        step = min(step, rules.max_steps - 1)
    found, of_next = None, rules.min_steps
    while of_next <= step:
        found = 0 if found is None else found + 1
        of_next *= rules.eta
    return found


def follow(
    sweep: Sweep, standing: TrialStanding, points: Iterable[tuple[int, float]]
) -> tuple[TrialStanding, list[Reached]]:
    """Return the trial's standing after these (step, value) points of its metric, and the newly
    reached rungs. A step is ignored unless it is higher than all earlier steps; a retry, for
    example, repeats steps."""
    reached = []
    for step, value in points:
        if standing.last_step is not None and step <= standing.last_step:
            continue
        standing = _after(sweep, standing, step, value)
        rung = None if sweep.early_stopping is None else rung_at(sweep.early_stopping, step)
        if rung is not None and (standing.rung is None or rung > standing.rung):
            standing = replace(standing, rung=rung)
            reached.append(Reached(rung, step, standing.value))
    return standing, reached


def _after(sweep: Sweep, standing: TrialStanding, step: int, value: float) -> TrialStanding:
    standing = replace(standing, last_step=step)
    number = value if math.isfinite(value) else None
    if sweep.by == "best" and not _is_better(sweep, number, standing.value):
        return standing
    return replace(standing, value=number, value_step=step)


def _is_better(sweep: Sweep, number: float | None, than: float | None) -> bool:
    if number is None or than is None:
        return number is not None
    return number > than if sweep.maximises else number < than


@dataclass(frozen=True)
class Ranked:
    """The rank of a trial among all trials that were judged at a rung, including the trial
    itself."""

    num_judged: int
    num_better: int
    """Number of better trials. Every trial with a value is better than a trial without a value."""

    def kept(self, eta: int) -> int:
        """Return how many of the trials continue: one in `eta`, but at least one."""
        return max(1, self.num_judged // eta)

    def goes_on(self, eta: int, value: float | None) -> bool:
        """Whether the trial continues. A trial without a value (NaN) continues only while no trial
        has a value. Trials with equal values are equally good."""
        return self.num_better < (1 if value is None else self.kept(eta))
