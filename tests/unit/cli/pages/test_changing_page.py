"""docs/guides/changing.md is correct: its commands are run, on a server on which jobs only wait."""

from __future__ import annotations

import re
from pathlib import Path

from dray.requests import DocumentChanges
from tests.integration.tour import blocks_of, run_tour
from tests.unit.api.serving import serving

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "changing.md").read_text()
TOUR_TAKES_S = 200


def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server:
        said = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    changed, reset, refused, by_http = said
    assert "changed resources.num_workers from 4 to 2; max_runtime_s from unset to 7200" in changed
    assert "QUEUED in default, priority 50" in reset
    assert "must be greater than or equal to 1 (at /document/resources/num_workers)" in refused
    assert "can't be changed after the submission" in refused
    assert "{'example': 'digits'} 3" in by_http


def test_its_table_has_every_field() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == DocumentChanges.model_fields.keys()
