"""The goodput ledger: what every slot-second of a job was used for.

A slot is held from when it was given until it is seen free, and every second of that belongs to
exactly one class. So the classes add up to what was held, and what nobody can account for is
`idle`: held, and of no use that anyone saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

Ledger = Mapping[str, float]
"""Slot-seconds by class; a class that is missing has none."""

MAX_SECONDS = 1e15
"""A million slots for thirty years: more is no ledger."""


class SlotClass(StrEnum):
    USEFUL = "useful"
    """In optimizer steps that count."""
    RECOMPUTED = "recomputed"
    """In steps that were done before and lost."""
    STARTING = "starting"
    """From when the slot was given to the first step."""
    DATA_WAIT = "data_wait"
    RECOVERING = "recovering"
    """From the loss of a rank until the group trained again."""
    CHECKPOINTING = "checkpointing"
    IDLE = "idle"
    """Held to no use: stopping, or nobody knows."""
    UNREPORTED = "unreported"
    """By a script that reported no step: it may be of use."""


def checked(said: Mapping[str, object]) -> dict[str, float]:
    """Every class with its seconds; ValueError for what is no ledger."""
    unknown = sorted(map(str, set(said) - set(SlotClass)))
    if unknown:
        raise ValueError(f"there is no class {unknown[0][:64]!r}")
    found = {}
    for slot_class in SlotClass:
        seconds = said.get(slot_class, 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError(f"{slot_class} is not a number")
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
            raise ValueError(f"{slot_class} is no time: {seconds!r}")
        found[slot_class.value] = float(seconds)
    return found


def total(ledger: Ledger) -> float:
    """All that was held."""
    return math.fsum(ledger.values())


def useful_share(ledger: Ledger) -> float | None:
    """The part of what was held that was of use; None where nothing was held, and of a script
    that reported no step, so that nobody can say."""
    held, useful = total(ledger), ledger.get(SlotClass.USEFUL, 0.0)
    has_steps = useful > 0 or ledger.get(SlotClass.RECOMPUTED, 0.0) > 0
    is_unknown = ledger.get(SlotClass.UNREPORTED, 0.0) > 0 and not has_steps
    return None if is_unknown or held <= 0 else useful / held


def replaced(whole: Ledger, before: Ledger, after: Ledger) -> dict[str, float]:
    """The sum `whole` of several attempts once one of them says `after`, having said `before`."""
    return {
        c.value: max(0.0, whole.get(c, 0.0) - before.get(c, 0.0) + after.get(c, 0.0))
        for c in SlotClass
    }


def growth(before: Ledger, after: Ledger) -> dict[str, float]:
    """What to add to counters that only grow; a second that changed its class stays counted."""
    grown = {c.value: after.get(c, 0.0) - before.get(c, 0.0) for c in SlotClass}
    return {name: seconds for name, seconds in grown.items() if seconds > 0}


def unaccounted(ledger: Ledger, held_s: float) -> dict[str, float]:
    """With `held_s` more slot-seconds that nobody told of: those of a supervisor that died
    between its last word and when the slots were seen free."""
    idle = ledger.get(SlotClass.IDLE, 0.0) + max(0.0, held_s)
    return {**{c.value: ledger.get(c, 0.0) for c in SlotClass}, SlotClass.IDLE.value: idle}
