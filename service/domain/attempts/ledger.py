"""The goodput ledger, which records how every slot-second of a job was used.

A slot is held from its assignment until the service observes that it is free, and every second of
this time belongs to exactly one category. The sum of the categories is therefore the time for which
slots were held. Unaccounted time is `idle`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ray_workers.shared.heartbeat import TimeCategory

Ledger = Mapping[str, float]
"""Slot-seconds by category; a missing category means 0."""

MAX_SECONDS = 1e15
"""Upper bound for the seconds of a category: a million slots for thirty years."""


def checked(reported: Mapping[str, object]) -> dict[str, float]:
    """Return the slot-seconds of every category. Raises ValueError if the ledger is not valid."""
    unknown = sorted(map(str, set(reported) - set(TimeCategory)))
    if unknown:
        raise ValueError(f"there is no time category {unknown[0][:64]!r}")
    found = {}
    for category in TimeCategory:
        seconds = reported.get(category, 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError(f"{category} is not a number")
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
            raise ValueError(
                f"{category} must be between 0 and {MAX_SECONDS:g} seconds, but is {seconds!r}"
            )
        found[category.value] = float(seconds)
    return found


def total(ledger: Ledger) -> float:
    """Return the total number of held slot-seconds."""
    return math.fsum(ledger.values())


def useful_share(ledger: Ledger) -> float | None:
    """Return the useful share of the held slot-seconds; None if no slot was held, or if a script
    did not report steps."""
    held, useful = total(ledger), ledger.get(TimeCategory.USEFUL, 0.0)
    has_steps = useful > 0 or ledger.get(TimeCategory.RECOMPUTED, 0.0) > 0
    is_unknown = ledger.get(TimeCategory.UNREPORTED, 0.0) > 0 and not has_steps
    return None if is_unknown or held <= 0 else useful / held


def useful_and_unreported(ledger: Ledger) -> tuple[float, float]:
    """Return the useful share and the unreported share of the held slot-seconds. The time of an
    empty ledger counts as unreported."""
    held = total(ledger)
    if held <= 0:
        return 0.0, 1.0
    useful, unreported = (
        ledger.get(category, 0.0) / held
        for category in (TimeCategory.USEFUL, TimeCategory.UNREPORTED)
    )
    return useful, unreported


def replaced(whole: Ledger, before: Ledger, after: Ledger) -> dict[str, float]:
    """Return the new sum of several ledgers after one of them has changed from `before` to `after`.
    whole: the sum before the change."""
    return {
        c.value: max(0.0, whole.get(c, 0.0) - before.get(c, 0.0) + after.get(c, 0.0))
        for c in TimeCategory
    }


def growth(before: Ledger, after: Ledger) -> dict[str, float]:
    """Return increments for counters that can only grow. Time that is moved to another category is
    counted in both categories."""
    grown = {c.value: after.get(c, 0.0) - before.get(c, 0.0) for c in TimeCategory}
    return {name: seconds for name, seconds in grown.items() if seconds > 0}


def unaccounted(ledger: Ledger, held_s: float) -> dict[str, float]:
    """Return the ledger with `held_s` additional idle slot-seconds: the time from a lost
    supervisor's last report until the service observed that its slots were free."""
    idle = ledger.get(TimeCategory.IDLE, 0.0) + max(0.0, held_s)
    return {**{c.value: ledger.get(c, 0.0) for c in TimeCategory}, TimeCategory.IDLE.value: idle}
