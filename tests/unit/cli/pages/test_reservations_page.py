"""docs/guides/reservations.md is correct: its commands are run, on a server on which jobs only
wait."""

from __future__ import annotations

from pathlib import Path

from tests.integration.tour import blocks_of, run_tour
from tests.unit.api.serving import serving

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "reservations.md").read_text()
TOUR_TAKES_S = 200


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        said = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    created, cluster, overlaps, refused, in_python = said
    assert cluster.split()[-1] == "RESERVATIONS"
    assert "nodes      2 nodes\n" in created
    assert "for        maintenance\n" in created
    assert "QUEUED" in created
    assert "the maintenance window 'disks' from" in overlaps
    assert "nodes      node8\n" in overlaps
    assert overlaps.endswith("the reservation includes this node if it joins the cluster\n")
    assert "there is no reservation 'other' for this job (at /reservation)" in refused
    assert in_python == "planned paper\n"
