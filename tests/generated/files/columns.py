"""Generated columns of a text table: the text of each cell, and its value."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from typing import Literal

Kind = Literal["number", "date", "truth", "name"]
OFFSETS = (
    *(0, 0, 0, 1_750_000_000, 1_750_000_000_000, 4_000_000_000, 20_260_101, 2_460_000),
    *(2**53 - 3, 2**53 + 1, -(2**53) - 2, 2**60, -(2**62), 2**63 - 9, 2**63 + 5, 2**64 - 12),
    *(10**15 - 4, 10**16, 10**19, -(10**20), 10**25),
)
MISSING = ("", "  ", "NA", "n/a", "NaN", "null", "None", "?", "-", "#N/A", "<NA>", "-nan")
NOT_A_NAME_EITHER = ("", " ")
WORDS = (
    *("ant", "bee", "Élan", "naïve", "日本", "a,b", 'say "no"', "two words", "x;y", "tab\there"),
    *("None", "NA", "true story", "1,5 m", "12-13", "é́", "🙂", "line\nbreak", " lead", "trail "),
    *("=1+1", "#tag", "'quoted'", "0x1F", "1_000", "a\u00a0b", "\u200bzero", "yes", "no", "A|B"),
    *("cr\rhere", "crlf\r\nhere", "nul\0here", '"', '""', "two\n\nends\n"),
)


@dataclass(frozen=True)
class Cell:
    text: str
    value: Fraction | float | int | str | None
    """An exact number, an infinity, a date (microseconds since 1970), a name, or None."""


@dataclass(frozen=True)
class Style:
    decimal: str = "."
    thousands: str | None = None
    units: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind
    cells: tuple[Cell, ...]
    missing: str = "error"
    is_categorical: bool = False


def number_column(dice: random.Random, num_rows: int, style: Style) -> list[Cell]:
    draw = dice.choice((_whole, _whole, _fraction, _mixed, _written_with_exponent, _long))
    offset = dice.choice(OFFSETS)
    width = dice.choice((3, 100, 10**6))
    odd = dice.random() < 0.06
    cells = [draw(dice, offset, width, style) for _ in range(num_rows)]
    if odd:
        text = dice.choice(("inf", "-inf", "Infinity", "+INF", "1e400", "4e38", "-1e39"))
        value: Fraction | float = float(text)
        if "e" in text:
            mantissa, _, power = text.partition("e")
            value = Fraction(int(mantissa)) * 10 ** int(power)
        cells[dice.randrange(num_rows)] = Cell(text.replace(".", style.decimal), value)
    return cells


def _grouped(digits: str, mark: str) -> str:
    parts = []
    while len(digits) > 3:
        digits, last = digits[:-3], digits[-3:]
        parts.append(last)
    return mark.join([digits, *reversed(parts)])


def _written(dice: random.Random, sign: str, whole: str, fraction: str, style: Style) -> str:
    if style.thousands and dice.random() < 0.7:
        whole = _grouped(whole, style.thousands)
    text = sign + whole + (style.decimal + fraction if fraction else "")
    if style.units and dice.random() < 0.6:
        unit = dice.choice(style.units)
        space = dice.choice(("", " "))
        text = (
            sign + unit + space + text[len(sign) :] if dice.random() < 0.5 else text + space + unit
        )
    return dice.choice(("", "", "", " ", "\t ", "\u00a0")) + text + dice.choice(("", "", "", " "))


def _whole(dice: random.Random, offset: int, width: int, style: Style) -> Cell:
    value = offset + dice.randint(-width, width)
    sign = "-" if value < 0 else dice.choice(("", "", "", "", "+"))
    zeros = "0" * dice.choice((0, 0, 0, 0, 2))
    return Cell(_written(dice, sign, zeros + str(abs(value)), "", style), Fraction(value))


def _fraction(dice: random.Random, offset: int, width: int, style: Style) -> Cell:
    digits = dice.choice((1, 2, 3, 6))
    scaled = (offset % 10**9) * 10**digits + dice.randint(-width, width)
    return _decimal(dice, scaled, digits, style)


def _decimal(dice: random.Random, scaled: int, digits: int, style: Style) -> Cell:
    whole, rest = divmod(abs(scaled), 10**digits)
    fraction = str(rest).rjust(digits, "0")
    shown = str(whole)
    if whole == 0 and dice.random() < 0.2:
        shown = ""
    sign = "-" if scaled < 0 else ""
    return Cell(_written(dice, sign, shown, fraction, style), Fraction(scaled, 10**digits))


def _mixed(dice: random.Random, offset: int, width: int, style: Style) -> Cell:
    return dice.choice((_whole, _fraction))(dice, offset, width, style)


def _long(dice: random.Random, offset: int, width: int, style: Style) -> Cell:
    """More digits than float64 has."""
    digits = dice.choice((16, 19, 25))
    return _decimal(dice, offset * 10**digits + dice.randint(-(10**22), 10**22), digits, style)


def _written_with_exponent(dice: random.Random, offset: int, width: int, style: Style) -> Cell:
    mantissa, power = dice.randint(-width, width), dice.randint(-12, 12)
    text = f"{mantissa}{style.decimal}5{dice.choice('eE')}{power:+d}"
    sign = -1 if mantissa < 0 else 1
    value = (Fraction(mantissa) + sign * Fraction(1, 2)) * Fraction(10) ** power
    return Cell(text, value)


def truth_column(dice: random.Random, num_rows: int) -> list[Cell]:
    cells = []
    for _ in range(num_rows):
        is_true = dice.random() < 0.5
        word = str(is_true)
        text = dice.choice((word, word.lower(), word.upper()))
        cells.append(Cell(text, Fraction(int(is_true))))
    return cells


def date_column(dice: random.Random, num_rows: int) -> list[Cell]:
    forms = dice.sample(("day", "minute", "second", "fraction", "zoned", "utc"), dice.randint(1, 3))
    first = dice.choice((datetime(1700, 1, 1), datetime(1969, 12, 31), datetime(2024, 2, 28)))
    cells = []
    for _ in range(num_rows):
        when = first + timedelta(
            days=dice.randint(-400, 40_000), microseconds=dice.randrange(86_400_000_000)
        )
        cells.append(_date(dice, when, dice.choice(forms)))
    return cells


def _date(dice: random.Random, when: datetime, form: str) -> Cell:
    mark = dice.choice("T ")
    zone = timezone(timedelta(minutes=dice.choice((0, 60, -210, 345, 720))))
    match form:
        case "day":
            when = when.replace(hour=0, minute=0, second=0, microsecond=0)
            text = when.strftime("%Y-%m-%d")
        case "minute":
            when = when.replace(second=0, microsecond=0)
            text = when.isoformat(mark, "minutes")
        case "second":
            when = when.replace(microsecond=0)
            text = when.isoformat(mark, "seconds")
        case "fraction":
            text = when.isoformat(mark, "microseconds") + dice.choice(("", "", "789"))
        case "zoned":
            when = when.replace(microsecond=0, tzinfo=zone)
            text = when.isoformat(mark, "seconds")
        case _:
            when = when.replace(microsecond=0)
            text = when.isoformat(mark, "seconds") + "Z"
    utc = when.replace(tzinfo=UTC) if when.tzinfo is None else when
    since = utc - datetime(1970, 1, 1, tzinfo=UTC)
    return Cell(text, (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds)


def name_column(dice: random.Random, num_rows: int) -> list[Cell]:
    """At least every second value is a word that is not a number, a date or a boolean."""
    words = dice.sample(WORDS, dice.randint(2, 6))
    sure = dice.choice(("ant", "bee", "cat"))
    cells = [
        Cell(text, text) for text in (dice.choice([*words, sure, sure]) for _ in range(num_rows))
    ]
    cells[0] = Cell(sure, sure)
    cells[-1] = Cell("other", "other")
    return cells
