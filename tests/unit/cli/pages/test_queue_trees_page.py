"""docs/guides/queue-trees.md is correct: its commands are run, on a server on which jobs only
wait."""

from __future__ import annotations

import re
from pathlib import Path

from service.domain.scheduling.outlook.situation import Situation
from tests.integration.tour import blocks_of, run_tour
from tests.unit.api.serving import serving
from tests.unit.service.domain.scheduling import snapshots

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "queue-trees.md").read_text()
TOUR_TAKES_S = 200


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        used_s = {("vision", "bob"): 7200.0, ("default", "bob"): 3600.0}
        server.sees(Situation(snapshots.snapshot([], used_s=used_s)), for_s=TOUR_TAKES_S)
        said = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    made, refused, too_much, shown, shared, ranked, changed, _in_python = said
    rows = [line.split("  ")[0:2] for line in made.splitlines() if " 0 " in line]
    assert re.search(r"^lab .*\n  language .*\n  vision ", made, flags=re.MULTILINE), rows
    assert "the queue 'lab' is the parent of other queues, so it can't hold jobs" in refused
    assert "choose a queue under it: language, vision" in refused
    assert "which forms a cycle" in refused
    assert "would add up to 7 CPU, but its quota is 6 CPU" in too_much
    assert "borrows    at most 4 CPU\n" in shown
    assert (
        "allowed    8 CPU more, according to the quota and borrowing limit of vision (8 CPU)\n"
        in shown
    )
    assert "children   language, vision\n" in shown
    assert re.search(r"^lab +- +1 +- +- +2.00", shared, flags=re.MULTILINE)
    assert re.search(r"^  vision +- +2 +- +- +2.00", shared, flags=re.MULTILINE)
    assert re.search(r"^tier +\d .*queue 'lab'.*\ntier +\d .*queue 'vision'", ranked, re.MULTILINE)
    assert "the queue 'lab' is the parent of vision" in changed
