"""A number that was found, and the text that it is read from."""

from __future__ import annotations

from typing import NamedTuple

from dray.train.reporting import MAX_KEY_CHARS, MAX_STEP, RESERVED_KEY

__all__ = ["MAX_KEY_CHARS", "MAX_STEP", "FoundPoint", "is_key", "number_in", "step_in"]


class FoundPoint(NamedTuple):
    key: str
    step: int
    value: float


def number_in(text: str) -> float | None:
    """The number that a text is, with or without the punctuation that ends a sentence; NaN and
    infinities are numbers too."""
    try:
        return float(text.strip().rstrip(".,;:%"))
    except ValueError:
        return None


def step_in(text: str) -> int | None:
    """The step that a text is, such as `12` or `12.0`."""
    number = number_in(text)
    return step_of(number) if number is not None else None


def step_of(number: float) -> int | None:
    is_step = 0 <= number <= MAX_STEP and number == int(number)
    return int(number) if is_step else None


def is_key(text: str) -> bool:
    """Whether a metric may have this name."""
    return 0 < len(text) <= MAX_KEY_CHARS and text.isprintable() and text != RESERVED_KEY
