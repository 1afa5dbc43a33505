"""Positions on an axis, its ticks, and their labels. All functions accept any finite floats."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

_CLOCK_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800),
)


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, which differ; with `is_log`, both are positive."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the position of the value: 0 at the lower end, and 1 at the upper end."""
        if self.is_log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        # The halves of the numbers don't overflow.
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)


def fitting(
    values: Iterable[float],
    *,
    is_log: bool = False,
    low: float | None = None,
    high: float | None = None,
    margin: float = 0.0,
) -> Axis:
    """Return an axis that shows all values, except for those beyond the given limits.

    On a log axis, values and limits that are not positive are ignored. margin: the part of the
    range of the values that is added at both ends.
    """
    known = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    least, most = (min(known), max(known)) if known else (1.0, 10.0) if is_log else (0.0, 1.0)
    given_low = low if low is not None and (low > 0 or not is_log) else None
    given_high = high if high is not None and (high > 0 or not is_log) else None
    if is_log:
        bottom = given_low or max(10.0 ** math.floor(math.log10(least)), sys.float_info.min)
        exponent = min(math.ceil(math.log10(most)), sys.float_info.max_10_exp)
        top = given_high or 10.0**exponent
    else:
        around = 2 * margin * (most / 2 - least / 2)
        bottom = _finite(least - around) if given_low is None else given_low
        top = _finite(most + around) if given_high is None else given_high
    # A range near the precision of a float has no distinct ticks.
    if bottom < top and top / 2 - bottom / 2 > 1e-12 * max(abs(bottom), abs(top)):
        return Axis(bottom, top, is_log)
    if is_log:
        return Axis(max(top / 10, sys.float_info.min), _finite(max(bottom, top) * 10), True)
    around = max(abs(bottom), abs(top)) / 10 or 1.0
    return Axis(_finite(min(bottom, top) - around), _finite(max(bottom, top) + around))


def _finite(value: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, value))


def ticks(axis: Axis, most: int) -> list[tuple[float, str]]:
    """Return up to `most` ticks of an axis with numbers, and their labels."""
    return _log_ticks(axis, most) if axis.is_log else _linear_ticks(axis, most)


def time_ticks(axis: Axis, most: int) -> list[tuple[float, str]]:
    """Return up to `most` ticks of an axis with Unix times, and their labels in UTC."""
    span = axis.high - axis.low
    step = next((one for one in _CLOCK_S if span / one <= most), None)
    if step is None:
        step = 86400 * math.ceil(_step(axis, most) / 86400)
    form = "%Y-%m-%d" if step >= 86400 else "%m-%d %H:%M" if span > 86400 else "%H:%M"
    form = "%H:%M:%S" if step < 60 else form
    return _at_multiples(axis, float(step), lambda at: _clock(at, form))


def clock_text(at: float) -> str:
    """Return a Unix time in UTC, or the number if it is not within the years 1 to 9999."""
    return _clock(at, "%Y-%m-%d %H:%M:%S")


def _clock(at: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return number(at)


def _step(axis: Axis, most: int) -> float:
    """Return the smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, ... that gives at most `most` ticks."""
    least = max(2 * ((axis.high / 2 - axis.low / 2) / most), sys.float_info.min)
    base = 10.0 ** math.floor(math.log10(least))
    return next((base * one for one in (1, 2, 5) if base * one >= least), base * 10)


def _linear_ticks(axis: Axis, most: int) -> list[tuple[float, str]]:
    step = _step(axis, most)
    digits = max(0, -math.floor(math.log10(step)))
    size = max(abs(axis.low), abs(axis.high))
    if size >= 1e6 or digits > 6:
        decimals = max(0, math.ceil(math.log10(size) - 1e-9) - math.floor(math.log10(step)))
        return _at_multiples(axis, step, lambda at: _exponential(at, min(decimals, 15)))
    return _at_multiples(axis, step, lambda at: f"{at:,.{digits}f}")


def _at_multiples(axis: Axis, step: float, text: Callable[[float], str]) -> list[tuple[float, str]]:
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    found: list[tuple[float, str]] = []
    # A range that is narrow compared with its numbers has few distinct multiples.
    for n in range(first, min(last, first + 50) + 1):
        at = n * step
        if math.isfinite(at) and (not found or at > found[-1][0]):
            found.append((at, text(at if n else 0.0)))
    return found


def _log_ticks(axis: Axis, most: int) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(axis.low) - 1e-9), math.floor(math.log10(axis.high) + 1e-9)
    num_decades = last - first + 1
    factors: Sequence[int] = (1, 2, 5) if num_decades <= 3 else (1,)
    every = max(1, math.ceil(num_decades / most))
    found = []
    for exponent in range(first - (num_decades <= 3), last + 1, every):
        for factor in factors:
            at = factor * 10.0**exponent
            if axis.low * (1 - 1e-9) <= at <= axis.high * (1 + 1e-9) and math.isfinite(at):
                found.append((at, number(at)))
    if len(found) < 2:
        return [(at, number(at)) for at in (axis.low, axis.high)]
    return found


def number(value: float) -> str:
    """Return a number with up to six significant digits, and with commas between thousands."""
    if not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    value += 0.0  # so that -0 is 0
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return _exponential(value, 5)
    if float(value).is_integer():
        return f"{value:,.0f}"
    digits = max(0, 5 - math.floor(math.log10(size)))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _exponential(value: float, decimals: int) -> str:
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return "0" if mantissa in ("0", "-0") else f"{mantissa}e{int(exponent)}"
