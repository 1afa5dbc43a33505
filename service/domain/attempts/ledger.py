"""The goodput ledger: how every slot-second of a job was used.

A slot is held from when it was given until it is seen free, and every second of that belongs to
exactly one category. So the categories add up to the time that slots were held, and time that
nobody can account for is `idle`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ray_workers.shared.heartbeat import TimeCategory

Ledger = Mapping[str, float]
"""Slot-seconds by category; a missing category has none."""

MAX_SECONDS = 1e15
"""A million slots for thirty years: more is no ledger."""


def checked(said: Mapping[str, object]) -> dict[str, float]:
    """Every category with its seconds; ValueError if this is no ledger."""
    unknown = sorted(map(str, set(said) - set(TimeCategory)))
    if unknown:
        raise ValueError(f"there is no class {unknown[0][:64]!r}")
    found = {}
    for category in TimeCategory:
        seconds = said.get(category, 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError(f"{category} is not a number")
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
            raise ValueError(f"{category} is no time: {seconds!r}")
        found[category.value] = float(seconds)
    return found


def total(ledger: Ledger) -> float:
    """The slot-seconds that were held."""
    return math.fsum(ledger.values())


def useful_share(ledger: Ledger) -> float | None:
    """The useful share of the time that slots were held; None where none was held, and of a
    script that reported no step, so that nobody can say."""
    held, useful = total(ledger), ledger.get(TimeCategory.USEFUL, 0.0)
    has_steps = useful > 0 or ledger.get(TimeCategory.RECOMPUTED, 0.0) > 0
    is_unknown = ledger.get(TimeCategory.UNREPORTED, 0.0) > 0 and not has_steps
    return None if is_unknown or held <= 0 else useful / held


def useful_and_unreported(ledger: Ledger) -> tuple[float, float]:
    """Shares of the time that slots were held: of useful time, and of time whose use nobody can
    say, which is all of an empty ledger."""
    held = total(ledger)
    if held <= 0:
        return 0.0, 1.0
    useful, unreported = (
        ledger.get(category, 0.0) / held
        for category in (TimeCategory.USEFUL, TimeCategory.UNREPORTED)
    )
    return useful, unreported


def replaced(whole: Ledger, before: Ledger, after: Ledger) -> dict[str, float]:
    """The sum `whole` of several attempts once one of them says `after`, having said `before`."""
    return {
        c.value: max(0.0, whole.get(c, 0.0) - before.get(c, 0.0) + after.get(c, 0.0))
        for c in TimeCategory
    }


def growth(before: Ledger, after: Ledger) -> dict[str, float]:
    """The increments of counters that only grow; a second that changed its category stays
    counted."""
    grown = {c.value: after.get(c, 0.0) - before.get(c, 0.0) for c in TimeCategory}
    return {name: seconds for name, seconds in grown.items() if seconds > 0}


def unaccounted(ledger: Ledger, held_s: float) -> dict[str, float]:
    """The ledger with `held_s` more slot-seconds that nobody reported: from the last report of a
    supervisor that died until its slots were seen free."""
    idle = ledger.get(TimeCategory.IDLE, 0.0) + max(0.0, held_s)
    return {**{c.value: ledger.get(c, 0.0) for c in TimeCategory}, TimeCategory.IDLE.value: idle}
