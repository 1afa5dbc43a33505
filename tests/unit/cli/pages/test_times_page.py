"""docs/guides/times.md is correct: its commands are run, on a server on which jobs only wait."""

from __future__ import annotations

from pathlib import Path

from tests.integration.tour import blocks_of, run_tour
from tests.unit.api.serving import serving

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "times.md").read_text()
TOUR_TAKES_S = 200


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        said = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    submitted, local, in_python, clocks, refused, singleton, of_queue = said
    assert submitted.count("QUEUED") == 2
    assert "begins     2030-07-01 06:00:00Z\n" in local
    assert "deadline   2030-07-01 16:00:00Z\n" in local
    assert in_python.startswith("20")
    assert "clocks are set forward from 2030-03-31T02:00:00 to 2030-03-31T03:00:00" in clocks
    assert "2029-10-28T02:30:00 occurs twice in Europe/Berlin" in clocks
    assert "job.yaml describes a job: image_classification on 1 worker" in clocks
    assert "with max_runtime_s: 7200 the job might run past its deadline (at /deadline)" in refused
    assert "its deadline, 2020-01-01 " in refused or "its deadline, 2019-12-31 " in refused
    assert "(at /singleton)" in singleton
    assert "run time   at most 2h00m, the default of its queue\n" in of_queue
    assert "run time   2h00m by default, at most 1d00h\n" in of_queue
    assert "is 172800 s, but the maximum of the queue 'short' is 86400 s" in of_queue
