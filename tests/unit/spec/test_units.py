"""Times and sizes in the forms that people write."""

from __future__ import annotations

import pytest

import dray
from dray.errors import SpecError
from dray.input import units


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("90s", 90), ("45m", 2700), ("45min", 2700), ("2h", 7200), ("1h30m", 5400)),
        *(("1.5h", 5400), ("3d", 259200), ("1w", 604800), (" 2 h ", 7200), ("1h 30m", 5400)),
    ],
)
def test_a_time_is_so_many_seconds(text: str, number: int) -> None:
    assert units.seconds(text) == number


@pytest.mark.parametrize(
    "text", ["", "2", "2x", "h", "-2h", "2h!", "1:30", "0.1s", "2 hours", "\u0662h"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="seconds"):
        units.seconds(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("8GiB", 8 << 30), ("8 GiB", 8 << 30), ("8gib", 8 << 30), ("500MB", 500_000_000)),
        *(("1.5KiB", 1536), ("7B", 7), ("1kB", 1000), ("2TiB", 2 << 40)),
    ],
)
def test_a_size_is_so_many_bytes(text: str, number: int) -> None:
    assert units.num_bytes(text) == number


@pytest.mark.parametrize("text", ["", "8", "8G", "8Gi", "GiB", "-1GiB", "8iB", "8XB", "0.1B"])
def test_what_is_no_size_or_an_ambiguous_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bytes|ambiguous"):
        units.num_bytes(text)


def test_a_job_keeps_the_numbers() -> None:
    document = {
        "recipe": "image_classification",
        "max_runtime_s": "2h",
        "resources": {"memory_bytes": "8GiB"},
    }
    stored = dray.validate(document).model_dump(mode="json")
    assert (stored["max_runtime_s"], stored["resources"]["memory_bytes"]) == (7200, 8 << 30)
    assert dray.validate(stored).max_runtime_s == 7200


@pytest.mark.parametrize("value", ["0s", "99999999d", "9" * 1000, True, 1.5, [], "1h" * 100_000])
def test_the_bounds_hold_whatever_the_unit(value: object) -> None:
    with pytest.raises(SpecError, match="/max_runtime_s"):
        dray.validate({"recipe": "image_classification", "max_runtime_s": value})
