"""Recorded programs: compares the metrics found with what their loggers were given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ray_workers.shared.contracts import GUESSED
from tests.generated.loggers.record import PROGRAMS
from tests.generated.loggers.replay import Series, output_of, series_of, truth_of

COUNTED = ("epoch", "time")
"""Columns and tags that the loggers add themselves."""
GUESSED_FROM: dict[str, dict[str, Callable[[int], bool]] | None] = {
    # Of a bar the log keeps one state a second: here the last one of each epoch.
    "tqdm": {"loss": lambda step: step % 8 == 0, "val_acc": lambda step: True},
    "keras-bar": None,
    "keras-lines": None,
    "logging": None,
    "print": None,
}
FILES = [
    name
    for name in PROGRAMS
    if name not in ("transformers-printed", "transformers-plain", *GUESSED_FROM)
]
TWO_BARS = re.compile(
    r"(\{'eval_[^\n]*\}\n)"
    r"(\r[^\r\n]*\| \d+/32 \[[^\r\n\x1b]*\])"
    r"(\n\r[^\r\n]*\| \d+/2 \[[^\r\n\x1b]*\]\x1b\[A)"
)
"""A record of an evaluation, the training's bar, and that of the evaluation in the next row."""


def once(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the first point of each step."""
    first: dict[int, float] = {}
    for step, value in points:
        first.setdefault(step, value)
    return [*first.items()]


def is_alike(found: list[tuple[int, float]], true: list[tuple[int, float]], digits: float) -> bool:
    return len(found) == len(true) and all(
        step == other and math.isclose(value, expected, rel_tol=digits, abs_tol=1e-12)
        for (step, value), (other, expected) in zip(found, true, strict=True)
    )


def differences(found: Series, truth: Series, digits: float) -> list[str]:
    """Return series of the truth that are not found exactly once, under a name with the run and the
    key, and series found that were never passed to a logger."""
    faults = []
    left = {name: points for name, points in found.items() if name.split("/")[-1] not in COUNTED}
    for label, points in truth.items():
        run, _, key = label.rpartition(":")
        names = [name for name in left if name == key or name.endswith(f"/{key}")]
        names = [name for name in names if is_alike(left[name], once(points), digits)]
        with_run = [name for name in names if run in name] or names
        if not with_run:
            faults.append(f"{label}: none of {sorted(found)} has {points}")
        else:
            del left[with_run[0]]
    return faults + [f"{name} is found, and was not given: {left[name]}" for name in left]


@pytest.mark.parametrize("name", FILES)
async def test_files_have_what_the_logger_was_given(name: str, tmp_path: Path) -> None:
    assert differences(await series_of(name, tmp_path), truth_of(name), 2e-5) == []


async def test_the_trainer_prints_what_it_logs(tmp_path: Path) -> None:
    assert await _differences_of_bars(tmp_path, None) == []


async def test_the_bar_of_an_evaluation_may_be_drawn_first(tmp_path: Path) -> None:
    """tqdm keeps its bars in a set, and redraws them in the set's order."""
    text = "".join(text for _, text in output_of("transformers-printed"))
    swapped, count = TWO_BARS.subn(r"\1\3\2", text)
    assert count > 3
    assert await _differences_of_bars(tmp_path, [(0.0, swapped)]) == []


async def test_an_evaluation_may_come_before_the_training(tmp_path: Path) -> None:
    """In this case, the first bar is not the training's."""
    bar = "\r  0%|          | 0/2 [00:00<?, ?it/s]\r100%|##########| 2/2 [00:00<00:00, 5.5it/s]\n"
    output = [(0.0, bar), *output_of("transformers-printed")]
    assert await _differences_of_bars(tmp_path, output) == []


async def _differences_of_bars(
    folder: Path, output: Sequence[tuple[float, str]] | None
) -> list[str]:
    truth = truth_of("transformers-printed")
    truth.pop("train/total_flos", None)  # which the program does not print
    found = await series_of("transformers-printed", folder, "transformers", output=output)
    return differences(found, truth, 5e-4)


async def test_no_record_of_a_trainer_without_a_bar_is_lost(tmp_path: Path) -> None:
    """No line has a step, so they are numbered."""
    truth = truth_of("transformers-plain")
    truth.pop("train/total_flos", None)
    found = await series_of("transformers-plain", tmp_path, "transformers")
    assert found.keys() == truth.keys()
    for key, points in found.items():
        true = [(at, value) for (at, _), (_, value) in zip(points, truth[key], strict=True)]
        assert is_alike(points, true, 5e-4), key


@pytest.mark.parametrize("name", GUESSED_FROM)
async def test_guesses_are_what_was_printed(name: str, tmp_path: Path) -> None:
    found = await series_of(name, tmp_path)
    truth = truth_of(name)
    shown = GUESSED_FROM[name]
    assert {key.removeprefix(GUESSED) for key in found} - {"lr"} == truth.keys()
    for key, points in truth.items():
        expected = [(at, one) for at, one in points if shown is None or shown[key](at)]
        if name.startswith("keras"):  # it prints the steps of an epoch, of which there are 3
            expected = [(3 * (epoch + 1), value) for epoch, value in expected]
        assert is_alike(found[GUESSED + key], expected, 1e-4), (key, found[GUESSED + key], expected)
