"""docs/guides/tracking.md is correct: its example is run, and its searches can be parsed."""

from __future__ import annotations

import re
from pathlib import Path

from service.domain.tracking.search import parse_search
from tests.integration.tour import blocks_of, run_tour
from tests.marks import SOAK
from tests.unit.api.serving import serving
from tests.unit.cli.pages.test_sweeps_page import training

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "tracking.md").read_text()
TOUR_TAKES_S = 200
RATES = ("rate-0.001", "rate-0.01", "rate-0.1")


@SOAK
def test_the_example_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server, training(server, *RATES):
        shown, compared, found = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    assert "rates: 3 jobs: 3 SUCCEEDED\nbaseline: none\n" in shown
    lines = [line.split() for line in compared.splitlines()]
    assert ["name", *RATES] in lines
    assert ["train.optimizer.lr", "0.001", "0.01", "0.1"] in lines
    assert ["val/accuracy", "0.48", "0.9231", "(+0.443)", "0.48"] in lines
    assert "tags: good\n" in found
    assert "Best of the three. **Next:** more epochs.\n" in found
    assert len(re.findall(r"rate-0.01 +SUCCEEDED", found)) == 2
    assert "rate-0.001" not in found


def test_each_search_of_the_page_can_be_read() -> None:
    section = PAGE.partition("\n## Searches\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| [^|]*\|$", section, flags=re.MULTILINE)
    searches = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(searches) > 15
    for text in searches:
        parse_search(text)
