"""Every benchmark has its module, and its row on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.report import as_json

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
