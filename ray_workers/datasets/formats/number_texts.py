"""Numbers in text: separators, units and exact values."""

from __future__ import annotations

import contextlib
import decimal
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from dray.spec import Data

MAX_DIGITS = 17
"""Distinct fractions with up to this many digits remain distinct in float64."""
MAX_WHOLE_DIGITS = 15
"""float64 represents all integers with up to this many digits."""
MAX_LENGTH = 1_000
"""Maximum length of a string that is treated as a number."""
_CURRENCIES = "$€£¥"
_THOUSANDS = (",", ".", " ", "'")
_SPACES = " \u00a0\u202f"
"""Spaces between groups of digits: the normal space and two non-breaking spaces."""
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_INFINITE = r"^[+-]?([iI][nN][fF]|[iI][nN][fF][iI][nN][iI][tT][yY])$"
_LEADING = r"^[+-]?[0.]*|\."
_WIDE = decimal.Context(prec=MAX_LENGTH + 100)

Exact = int | float | Decimal


@dataclass(frozen=True)
class NumberStyle:
    """The notation of numbers in a file. Python and Arrow share its regular expressions."""

    decimal: str = "."
    thousands: str | None = None
    units: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Data) -> Self:
        return cls(data.decimal, data.numbers.thousands, tuple(data.numbers.units))

    def value_of(self, text: str) -> Exact:
        """Return the number in a string. The result is an int or a Decimal if a float would lose
        digits. Raises ValueError if the string is not a number."""
        plain = text.strip()
        for pattern, instead in self._units:
            plain = re.sub(pattern, instead, plain)
        is_sound = True
        if self.thousands is not None:
            is_sound = not re.search(self._mark, plain) or bool(re.search(self._grouped, plain))
            plain = re.sub(self._mark, "", plain)
        if self.decimal != ".":
            is_sound = is_sound and "." not in plain
            plain = plain.replace(self.decimal, ".")
        if not is_sound or len(plain) > MAX_LENGTH:
            raise ValueError(f"{text!r} is not a number")
        return _exact(plain)

    def plain(self, texts: Any) -> tuple[Any, Any]:
        """Return (plain strings, whether each string is a number) for an Arrow array of strings
        without surrounding spaces. Equivalent to `value_of` for a column."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self == PLAIN:
            # Converting numbers with Arrow is ten times as fast as matching them with a pattern.
            with contextlib.suppress(pa.ArrowInvalid):
                texts.cast(pa.float64())
                return texts, pc.true_unless_null(texts)
        for pattern, instead in self._units:
            texts = pc.replace_substring_regex(texts, pattern, instead)
        faults = pc.greater(pc.utf8_length(texts), MAX_LENGTH)
        if self.thousands is not None:
            has_mark = pc.match_substring_regex(texts, self._mark)
            is_grouped = pc.match_substring_regex(texts, self._grouped)
            faults = pc.or_(faults, pc.and_not(has_mark, is_grouped))
            texts = pc.replace_substring_regex(texts, self._mark, "")
        if self.decimal != ".":
            faults = pc.or_(faults, pc.match_substring(texts, "."))
            texts = pc.replace_substring(texts, self.decimal, ".")
        is_number = pc.or_(
            pc.match_substring_regex(texts, _NUMBER), pc.match_substring_regex(texts, _INFINITE)
        )
        return texts, pc.and_not(is_number, faults)

    @cached_property
    def _units(self) -> tuple[tuple[str, str], ...]:
        """Two pairs (pattern, replacement): for units before a number, and for units after a
        number."""
        if not self.units:
            return ()
        one = "|".join(re.escape(unit) for unit in sorted(self.units, key=len, reverse=True))
        spaces = f"[{_SPACES}]*"
        return (f"^([+-]?)(?:{one}){spaces}", r"\1"), (f"{spaces}(?:{one})$", "")

    @cached_property
    def _mark(self) -> str:
        assert self.thousands is not None
        return f"[{_SPACES}]" if self.thousands == " " else re.escape(self.thousands)

    @cached_property
    def _grouped(self) -> str:
        """Pattern for groups of three digits, or of two digits before the last three, as in
        India."""
        fraction = f"(?:{re.escape(self.decimal)}[0-9]*)?"
        return f"^[+-]?[0-9]{{1,3}}(?:{self._mark}[0-9]{{2,3}})*{self._mark}[0-9]{{3}}{fraction}$"

    def advice(self, text: str) -> str:
        """Return a hint about options that would make the text a number; empty if there are
        none."""
        ways = [one for one in self._near(text) if one._reads(text)]
        if not ways:
            return ""
        first, *others = ways
        hint = f"; to read this value as a number, set {first._options(self)}"
        # A comma before three digits can be a decimal or a thousands separator.
        if others and others[0].value_of(text) != first.value_of(text):
            hint += f"; if it has thousands separators, set {others[0]._options(self)}"
        return hint

    def _near(self, text: str) -> Iterator[NumberStyle]:
        """Yield alternative number styles, most likely first."""
        core = text.strip()
        found = [core[-1]] if core[-1:] == "%" else []
        found += [mark for mark in _CURRENCIES if mark in core]
        units = (*self.units, *(unit for unit in found if unit not in self.units))
        other = "," if self.decimal == "." else "."
        for thousands in (None, *_THOUSANDS):
            for sign in (self.decimal, other):
                if sign != thousands:
                    yield NumberStyle(sign, thousands or self.thousands, units)

    def _reads(self, text: str) -> bool:
        try:
            self.value_of(text)
        except ValueError:
            return False
        return True

    def _options(self, now: NumberStyle) -> str:
        """Return the options in which this style differs from `now`."""
        numbers = []
        if self.thousands != now.thousands:
            numbers.append(f'thousands: "{self.thousands}"')
        if self.units != now.units:
            units = ", ".join(f'"{unit}"' for unit in self.units)
            numbers.append(f"units: [{units}]")
        options = []
        if self.decimal != now.decimal:
            options.append(f'data.decimal: "{self.decimal}"')
        if numbers:
            options.append(f"data.numbers: {{{', '.join(numbers)}}}")
        return " with ".join(options)


PLAIN = NumberStyle()
"""Numbers in Python's notation."""


def _exact(text: str) -> Exact:
    if re.search(_INFINITE, text):
        return float(text)
    if not re.search(_NUMBER, text):
        raise ValueError(f"{text!r} is not a number")
    if "e" in text.lower():
        return float(text)
    digits = re.sub(_LEADING, "", text)
    if "." not in text:
        return int(text) if len(digits) > MAX_WHOLE_DIGITS else float(text)
    return Decimal(text) if len(digits) > MAX_DIGITS else float(text)


def exact_values(plain: Any) -> list[Exact] | None:
    """Return the exact numbers in an Arrow array of plain texts, with 0 for null; None if float64
    is sufficient. float64 might not distinguish integers with more than 15 digits, or fractions
    with more than 17 digits."""
    import pyarrow.compute as pc

    texts = pc.fill_null(plain, "0")
    digits = pc.utf8_length(pc.replace_substring_regex(texts, _LEADING, ""))
    most = pc.if_else(pc.match_substring(texts, "."), MAX_DIGITS, MAX_WHOLE_DIGITS)
    has_exponent = pc.match_substring_regex(texts, "[eE]")
    if not pc.any(pc.and_not(pc.greater(digits, most), has_exponent)).as_py():
        return None
    return [_exact(text) for text in texts.to_pylist()]


def relative(value: Exact, base: int) -> float:
    """Return value - base. Only the final result is rounded."""
    if isinstance(value, Decimal):
        return float(_WIDE.subtract(value, Decimal(base)))
    if isinstance(value, float):
        if base == 0 or not value.is_integer():  # includes infinities and NaN
            return value - base
        value = int(value)
    try:
        return float(value - base)
    except OverflowError:
        return math.inf if value > base else -math.inf


def number_name(value: Exact) -> str:
    """Return a number as the name of a class: `3` instead of `3.0`."""
    if math.isfinite(value) and value == int(value):
        return str(int(value))
    return format(value.normalize(_WIDE), "f") if isinstance(value, Decimal) else repr(value)
