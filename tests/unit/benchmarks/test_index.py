"""Every benchmark has its module, and its row on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.report import as_json, page, seconds

ROOT = Path(__file__).parents[3] / "benchmarks"


def test_the_page_has_a_row_for_each_benchmark() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(BENCHMARKS)


@pytest.mark.parametrize("module", BENCHMARKS.values())
def test_each_has_a_module_that_measures(module: str) -> None:
    assert "\ndef measure(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


def test_lists_of_samples_fill_their_lines() -> None:
    assert as_json({"a": [1, 2.5], "b": {"c": ["x" * 90, "y"]}}) == (
        '{\n "a": [1, 2.5],\n "b": {\n  "c": [\n   "' + "x" * 90 + '",\n   "y"\n  ]\n }\n}'
    )


def kept(name: str) -> tuple[dict[str, str], list[float], dict[str, str]]:
    """Medians by label, ratios, and the first table of a kept result, by the first column."""
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text())
    table = {row[0]: row[-2] for row in found["tables"][0]["rows"]} if found["tables"] else {}
    medians = {row["label"]: seconds(row["p50"]) for row in found["rows"]}
    return medians, [each["ratio"]["value"] for each in found["comparisons"]], table


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    rows = (ROOT.parent / "README.md").read_text().splitlines()
    (lost, first, useful, step, gpu, stall) = (
        next(row for row in rows if row.startswith(f"| {begin}"))
        for begin in (
            "time from the kill",
            "time from the HTTP",
            "useful",
            "duration of a step of dray's",
            "duration of a step of a",
            "stall",
        )
    )
    recovery, _, goodput = kept("recovery")
    peers = ("torchft", "torchrun --max-restarts", "Ray Train, FailureConfig")
    assert [
        recovery[name] for name in ("dray, a rank killed", *peers) if recovery[name] not in lost
    ] == []
    starts, _, _ = kept("submit_to_first_step")
    names = ("dray, POST of a recipe", "torchrun, cold", "Ray Train on a running cluster")
    assert [starts[name] for name in names if starts[name] not in first] == []
    assert f"| {kept('goodput')[1][0]:.1%} |" in useful
    assert [goodput[name] for name in peers[1:] if goodput[name] not in useful] == []
    assert f"| {kept('step_time')[1][1]:.2f} times that of" in step
    assert f"| {kept('gpu')[1][0]:.3f} times that of" in gpu
    stalls, _, _ = kept("checkpoint_stall")
    savers = (f"500 MB, 2 ranks: {name}" for name in ("dray", "DCP async_save", "torch.save"))
    assert [stalls[name] for name in savers if stalls[name] not in stall] == []


def test_the_page_of_the_results_shows_the_stored_results() -> None:
    assert (ROOT / "results/README.md").read_text() == page(ROOT / "results")
