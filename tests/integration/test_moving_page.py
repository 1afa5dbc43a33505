"""The blocks in docs/guides/moving.md work in their order, as for a new user."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from dray import Client
from tests.integration.harness import ROOT, Service
from tests.integration.tour import blocks_of, run_tour

PAGE = (ROOT / "docs" / "guides" / "moving.md").read_text()
TOUR_TAKES_S = 270
LINE = "y = 3.0 x + 1.0"


def _tour(service: Service, home: Path) -> tuple[Path, list[str]]:
    """The folder of the tour, and what its blocks printed. On a busy machine a program under
    torchrun, which is the first block, aborts now and then at its end, in a thread of gloo."""
    for name in ("first", "again"):
        folder = home / name
        folder.mkdir()
        try:
            return folder, run_tour(service, folder, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
        except AssertionError as error:
            if name == "again" or "=== block 1" in str(error) or LINE not in str(error):
                raise
            warnings.warn(f"made again: {error}", stacklevel=2)
    raise AssertionError("the second tour returns or raises")


@pytest.mark.ray
def test_every_block_does_what_the_page_says(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    tmp_path, said = _tour(embedded, tmp_path)
    by_torchrun, by_dray, with_metrics, unbreakable = said
    losses = re.findall(r"loss=\S+", by_torchrun)
    assert LINE in by_torchrun
    assert len(losses) == 4
    assert re.findall(r"loss=\S+", by_dray) == losses  # the very same training
    assert LINE in by_dray
    assert "SUCCEEDED" in by_dray
    assert (tmp_path / "line" / "result" / "line.pt").is_file()
    assert "train/loss" in with_metrics
    assert unbreakable.count(LINE) == 2
    job = next(client.jobs(name="line-with-metrics"))
    series = client.metrics(job.id).series["train/loss"]
    assert list(series.steps) == list(range(50, 401, 50))
