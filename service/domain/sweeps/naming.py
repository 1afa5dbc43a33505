"""Names that distinguish the jobs of an array: the index, and the parameters that differ between
the trials of a sweep."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

MAX_VALUE = 32
"""Maximum number of characters of a value; longer values are truncated."""
MAX_VARIANT = 200
"""Maximum number of characters of a variant."""


def varied(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a short name for each parameter of a sweep whose value can differ between trials.

    parameters: `sweep.parameters` as stored. The short name is the end of the dotted path, with as
    many of its parts as are needed to distinguish it from the other parameters: `lr`, or
    `optimizer.lr` if there is also `schedule.lr`.
    """
    return {
        name: _shortest(name, parameters)
        for name, given in parameters.items()
        if given.get("choices") is None or len(given["choices"]) > 1
    }


def _shortest(name: str, others: Collection[str]) -> str:
    parts = name.split(".")
    ends = (".".join(parts[-number:]) for number in range(1, len(parts)))
    return next((end for end in ends if _is_distinct(end, name, others)), name)


def _is_distinct(end: str, name: str, others: Collection[str]) -> bool:
    return not any(
        other != name and (other == end or other.endswith(f".{end}")) for other in others
    )


def variant(index: int, values: Mapping[str, Any] | None, names: Mapping[str, str]) -> str:
    """Return the index of an array's job, followed by the values that distinguish a trial:
    `#3 lr 0.01, width 32`.

    values: the parameters of the trial; None if it has none yet. names: the result of `varied`.
    """
    shown = ((short, values[name]) for name, short in names.items() if values and name in values)
    text = f"#{index} " + ", ".join(f"{short} {_text(value)}" for short, value in shown)
    return _truncated(text.rstrip(), MAX_VARIANT)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _truncated(value if isinstance(value, str) else json.dumps(value), MAX_VALUE)


def _truncated(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
