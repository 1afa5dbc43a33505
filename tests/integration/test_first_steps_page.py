"""The blocks in docs/first-steps.md work in their order, as for a new user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.harness import ROOT, Service
from tests.integration.tour import blocks_of, run_tour

PAGE = (ROOT / "docs" / "first-steps.md").read_text()
TOUR_TAKES_S = 270


@pytest.mark.ray
def test_every_block_does_what_the_page_says(embedded: Service, tmp_path: Path) -> None:
    printed = run_tour(embedded, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    trained, read, predicted, drilled, ended, swept, program = printed

    assert "SUCCEEDED" in trained
    assert "first" in read
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert re.search(r"^predicted \[.+\] of \[0, 1, 2, 3, 4\]$", predicted, flags=re.MULTILINE)
    assert re.search(r"^recovered in [0-9.]+ s, 0 steps lost$", drilled, flags=re.MULTILINE)
    assert "CANCELLED" in ended
    assert len(re.findall(r"\b0\.1\b|\b0\.01\b|\b0\.001\b", swept)) >= 3
    assert "y = 3.000 x + 2.000" in program
    assert (tmp_path / "fitted" / "linear.pt").is_file()
