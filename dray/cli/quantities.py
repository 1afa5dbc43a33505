"""Numbers on the command line that may have a unit."""

from __future__ import annotations

import math
from collections.abc import Callable

import typer

from dray.input import units


def seconds(text: str) -> float:
    """`90`, `1.5`, `2h`, `1h30m`."""
    return _read(text, units.seconds)


def num_bytes(text: str) -> int:
    """`1000000`, `8GiB`."""
    return int(_read(text, units.num_bytes))


def _read(text: str, with_unit: Callable[[str], int]) -> float:
    try:
        number = float(text)
    except ValueError:
        try:
            return with_unit(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} {error}") from None
    if not math.isfinite(number) or number < 0:
        raise typer.BadParameter(f"{text!r} must be a number of at least 0")
    return number
